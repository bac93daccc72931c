// The page's data and state: rows by column, what passes the filter, what is chosen.
"use strict";
const kv = {};
(() => {
  const raw = JSON.parse(document.getElementById("data").textContent);
  kv.count = raw.count;
  kv.files = raw.files;
  kv.labels = raw.labels;
  kv.columns = Object.keys(raw.numbers);
  const numbers = new Map(Object.entries(raw.numbers));
  const intervals = new Map(Object.entries(raw.intervals));
  const details = new Map(Object.entries(raw.details));

  kv.has = (column) => numbers.has(column);
  kv.num = (column, row) => (numbers.has(column) ? numbers.get(column)[row] : null);
  kv.text = (name, row) => raw.texts[name].values[raw.texts[name].index[row]];
  kv.details = (row) => details.get(String(row)) || {};
  kv.interval = (metric, row) => {
    const ends = intervals.get(metric);
    return ends && ends.low[row] !== null ? [ends.low[row], ends.high[row]] : null;
  };
  kv.good = (row) => kv.text("status", row) === "ok";
  kv.baseName = (path) => path.slice(path.lastIndexOf("/") + 1);
  kv.traceName = (row) => kv.baseName(kv.text("trace", row));
  // Rows of one group stand comparison: the same text, decoded in the same mode.
  kv.groupKey = (row) => JSON.stringify([
    kv.text("trace", row), kv.text("trace_fingerprint", row), kv.num("sequence", row),
    kv.text("mode", row)
  ]);
  // A row of sequence -1 is the mean of its policy's rows.
  kv.isMean = (row) => kv.num("sequence", row) === -1;
  kv.sequenceName = (row) =>
      (!kv.isMean(row) ? `sequence ${kv.num("sequence", row)}`
                       : `mean of ${kv.num("sweep.sequences", row) ?? "its"} sequences`);
  kv.groupName = (row) => `${kv.traceName(row)}, ${kv.sequenceName(row)}, ${kv.text("mode", row)}`;
  kv.groupBy = (items, of) => {
    const out = new Map();
    for (const item of items) {
      const key = of(item);
      if (!out.has(key)) out.set(key, []);
      out.get(key).push(item);
    }
    return out;
  };
  kv.distinct = (of, rows) => [...new Set(rows.map(of))];
  kv.allRows = Array.from({length: kv.count}, (_, i) => i);

  // ---- metrics ----
  const high = new Set([
    "attention_recall", "recall_bound", "output_cosine", "sigma_over_half", "heads_improved",
    "evidence_mass", "evidence_kept", "evidence_gain", "top1_agreement", "gap_closed",
    "answer_accuracy", "full_answer_accuracy"
  ]);
  kv.shortName = (column) => {
    const dot = column.indexOf(".");
    const section = column.slice(0, dot), name = column.slice(dot + 1);
    if (section === "confidence") return `confidence ${name}`;
    if (section === "tokens") return `${name} tokens`;
    return dot < 0 ? column : name;
  };
  kv.higherIsBetter = (column) => {
    const name = column.slice(column.indexOf(".") + 1);
    return high.has(name) || name.startsWith("kept_share.");
  };
  // What is no policy's doing: a bound, the reference itself.
  kv.isReference = (column) => /^quality\.(full_|recall_bound$|evidence_mass$)/.test(column);
  kv.metrics = () => kv.columns.filter((c) => c.startsWith("quality.") && !kv.isReference(c));
  kv.rankingMetric = () => {
    const order = [
      "logit_kl", "kl_proxy", "residual_rel_l2", "output_rel_l2", "attention_recall"
    ].map((n) => `quality.${n}`);
    const filled = (column) =>
        kv.allRows.filter((r) => kv.good(r) && kv.num(column, r) !== null).length;
    const scored =
        kv.allRows.filter((r) => kv.good(r) && order.some((c) => kv.num(c, r) !== null)).length;
    const present = order.filter((c) => kv.has(c) && filled(c) > 0);
    const most = present.reduce((a, b) => (a !== null && filled(a) >= filled(b) ? a : b), null);
    return present.find((c) => filled(c) === scored) || most || kv.metrics()[0] || null;
  };

  // ---- numbers for eyes ----
  kv.digits = (value, count = 4) => {
    if (value === null || value === undefined) return "";
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e7 || size < 1e-4) return value.toExponential(count - 1);
    if (Number.isInteger(value)) return String(value);
    return size >= 10 ** count ? String(Math.round(value)) : value.toPrecision(count);
  };
  kv.bytes = (value) => {
    if (value === null || value === undefined) return "";
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let at = 0;
    while (Math.abs(value) >= 1024 && at < units.length - 1) {
      value /= 1024;
      at += 1;
    }
    return `${at === 0 ? Math.round(value) : value.toPrecision(4)} ${units[at]}`;
  };
  kv.show = (column, value) => {
    if (value === null || value === undefined) return "";
    if (column === "sequence" && value === -1) return "mean";
    if (/bytes_per_s$/.test(column)) return `${(value / 1e9).toPrecision(3)} GB/s`;
    return /_bytes$/.test(column) ? kv.bytes(value) : kv.digits(value);
  };
  kv.percent = (share) => `${(100 * share).toPrecision(share < 0.1 ? 2 : 3)} %`;
  kv.plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;

  // ---- Pareto ----
  // Rows on the front of x (less is better) against y, within their groups; ascending x.
  kv.front = (rows, x, y) => {
    const groups = new Map();
    const sign = kv.higherIsBetter(y) ? -1 : 1;
    for (const row of rows) {
      const bytes = kv.num(x, row), quality = kv.num(y, row);
      if (!kv.good(row) || bytes === null || quality === null) continue;
      const key = kv.groupKey(row);
      if (!groups.has(key)) groups.set(key, []);
      groups.get(key).push({row, bytes, loss: sign * quality});
    }
    const out = new Map();
    for (const [key, group] of groups) {
      group.sort((a, b) => a.bytes - b.bytes || a.loss - b.loss || a.row - b.row);
      let best = Infinity, bestBytes = 0;
      const front = [];
      for (const at of group) {
        if (at.loss < best || (at.loss === best && at.bytes === bestBytes)) front.push(at.row);
        if (at.loss < best) {
          best = at.loss;
          bestBytes = at.bytes;
        }
      }
      out.set(key, front);
    }
    return out;
  };

  // ---- state: everything that is drawn follows from this; listeners redraw ----
  const listeners = {filter: [], choice: [], axes: [], theme: []};
  kv.on = (what, run) => what.split(" ").forEach((name) => listeners[name].push(run));
  kv.tell = (what) => listeners[what].forEach((run) => run());

  kv.x = "memory.mean_bytes";
  kv.y = kv.rankingMetric();
  kv.frontRows = new Set();
  kv.updateFront = () => {
    kv.frontRows = new Set(kv.y ? [...kv.front(kv.allRows, kv.x, kv.y).values()].flat() : []);
  };

  kv.mostChosen = 6;
  kv.chosen = [];
  kv.focus = null;
  kv.choose = (row) => {
    if (!kv.chosen.includes(row)) kv.chosen = [...kv.chosen, row].slice(-kv.mostChosen);
    kv.focus = row;
    kv.tell("choice");
  };
  kv.drop = (row) => {
    kv.chosen = kv.chosen.filter((r) => r !== row);
    if (kv.focus === row) kv.focus = kv.chosen.length ? kv.chosen[kv.chosen.length - 1] : null;
    kv.tell("choice");
  };

  // The row itself if it passes the test, else one of the same policy that does: the sequences of a
  // mean, the open-loop row of a closed-loop one. Null if there is none.
  kv.standIn = (row, test) => {
    if (row === null || test(row)) return row;
    const same =
        kv.allRows.filter((r) => kv.text("policy", r) === kv.text("policy", row) && test(r));
    return same.find((r) => kv.text("mode", r) === kv.text("mode", row)) ?? same[0] ?? null;
  };
  // For a chart of one row: the one in focus, else the last chosen one that can be drawn.
  kv.drawnRow = (test) => kv.standIn(kv.focus, test) ?? kv.chosen.findLast(test) ?? null;

  const searchText = new Map();
  const words = (row) => {
    if (!searchText.has(row)) {
      searchText.set(row, [
        kv.labels[row],
        ...["policy", "trace", "precision", "mode", "status", "note"].map(
            (name) => kv.text(name, row))
      ].join("\n").toLowerCase());
    }
    return searchText.get(row);
  };
  const columnNamed = (name) =>
      kv.columns.find((c) => c === name) || kv.columns.find((c) => c.endsWith(`.${name}`));
  // budget, high, tau, ...: a parameter's number as it stands in the resolved policy.
  const parameter = (row, name) => {
    const escaped = name.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
    const found = kv.text("policy", row)
                      .match(new RegExp(`[:,]${escaped}=(-?[0-9.]+(?:e-?[0-9]+)?)(?=[,+]|$)`, "i"));
    return found ? Number(found[1]) : null;
  };
  const compare = {
    "<": (a, b) => a < b,
    ">": (a, b) => a > b,
    "<=": (a, b) => a <= b,
    ">=": (a, b) => a >= b,
    "=": (a, b) => a === b
  };
  const condition = (word) => {
    const parts = word.match(/^([a-z0-9_.]+)(<=|>=|<|>|=)(-?[0-9.]+(?:e-?[0-9]+)?)$/);
    if (parts) {
      const column = columnNamed(parts[1]), limit = Number(parts[3]), test = compare[parts[2]];
      return (row) => {
        const value = column ? kv.num(column, row) : parameter(row, parts[1]);
        return value !== null && test(value, limit);
      };
    }
    if (word === "mean") return (row) => kv.isMean(row) || !averaged.has(policyKey(row));
    if (word === "front") return (row) => kv.frontRows.has(row);
    if (word.length > 1 && word.startsWith("-"))
      return (row) => !words(row).includes(word.slice(1));
    return (row) => words(row).includes(word);
  };
  const policyKey = (row) => JSON.stringify([kv.text("policy", row), kv.text("mode", row)]);
  const averaged = new Set(kv.allRows.filter(kv.isMean).map(policyKey));
  // Where there are means, they are what a reader asks for first.
  kv.filterText = averaged.size ? "mean" : "";
  kv.visible = kv.allRows;
  kv.applyFilter = () => {
    const conditions = kv.filterText.toLowerCase().split(/\s+/).filter(Boolean).map(condition);
    kv.visible = conditions.length ? kv.allRows.filter((row) => conditions.every((c) => c(row)))
                                   : kv.allRows;
  };

  // ---- elements ----
  kv.at = (id) => document.getElementById(id);
  // Texts only: nothing that comes from a name is ever read as HTML.
  kv.make = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "on")
        for (const [event, run] of Object.entries(value)) element.addEventListener(event, run);
      else if (value !== null && value !== false)
        element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children.filter((c) => c !== null && c !== undefined));
    return element;
  };
  kv.noDetails =
      "no row has what it needs (results files hold it for the first rows and those on " +
      "the Pareto front)";
  // One row of a reason list per chart that cannot be drawn from the data.
  kv.leftOut = new Map();
  kv.showCard = (id, title, reason) => {
    kv.at(`${id}-card`).hidden = Boolean(reason);
    if (reason)
      kv.leftOut.set(id, `${title}: ${reason}`);
    else
      kv.leftOut.delete(id);
    const list = kv.at("left-out");
    list.replaceChildren(...[...kv.leftOut.values()].map((text) => kv.make("li", {}, text)));
    kv.at("left-out-card").hidden = kv.leftOut.size === 0;
    return !reason;
  };

  // ---- colours ----
  const light = [
    "#1a5fb4", "#c64600", "#26854c", "#8a3ea8", "#b5356a", "#7a5b00", "#00788a", "#5b6472",
    "#a51d2d", "#3d3846"
  ];
  const dark = [
    "#6cb0ff", "#ff9a52", "#5fd38d", "#d18bef", "#ff86b3", "#e0bd4e", "#4fd0e2", "#a9b3c4",
    "#ff8a80", "#c9c3d4"
  ];
  kv.printing = () => "print" in document.documentElement.dataset;
  kv.isDark = () => !kv.printing() &&
      (document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark"
                                              : matchMedia("(prefers-color-scheme: dark)").matches);
  kv.variable = (name) =>
      getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  kv.colour = (i) => (kv.isDark() ? dark : light)[i % light.length];
  const names = kv.distinct((r) => kv.text("name", r), kv.allRows);
  kv.policyColour = (row) => kv.colour(names.indexOf(kv.text("name", row)));
  kv.chosenColour = (row) => kv.colour(kv.chosen.indexOf(row));
})();
