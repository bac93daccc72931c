// Summary, notes, provenance, filter, theme: the rest of the page, and its start.
"use strict";
(() => {
  const honest = "Open loop: recorded activations were replayed. What evicted context changes in " +
      "later hidden states is left out.";
  const join = (items) =>
      (items.length < 2 ? items.join("")
                        : `${items.slice(0, -1).join(", ")} and ${items[items.length - 1]}`);
  const modeNames = {open: "in open loop", closed: "with the model in the loop", time: "timed"};

  const whatWasRun = () => {
    const rows = kv.allRows;
    const traces = kv.distinct((r) => kv.text("trace", r), rows),
          policies = kv.distinct((r) => kv.text("name", r), rows);
    const modes = kv.distinct((r) => kv.text("mode", r), rows).map((m) => modeNames[m] || m);
    const sequences = kv.distinct(
                            (r) => JSON.stringify([kv.text("trace", r), kv.num("sequence", r)]),
                            rows.filter((r) => !kv.isMean(r)))
                          .length;
    const where = traces.length === 1 ? kv.baseName(traces[0]) : kv.plural(traces.length, "trace");
    const steps = kv.distinct((r) => kv.num("tokens.decoded", r), rows).filter((n) => n > 0);
    return `${kv.plural(rows.length, "row")}: ${
               policies.length === 1 ? policies[0] : `${policies.length} policies`} on ${where}` +
        (sequences > traces.length ? ` (${sequences} sequences)` : "") +
        (steps.length === 1 ? `, ${kv.plural(steps[0], "decode step")}` : "") + `, ${join(modes)}.`;
  };
  const inWords = (row) => {
    const ratio = kv.num("memory.memory_ratio", row), bytes = kv.num("memory.mean_bytes", row);
    return [
      kv.make("b", {}, kv.labels[row]),
      `: ${kv.bytes(bytes)}${ratio === null ? "" : `, ${kv.percent(ratio)} of everything kept`}; ` +
          `${kv.shortName(kv.y)} ${kv.show(kv.y, kv.num(kv.y, row))}`
    ];
  };
  // The longest front: the best under a share of the bytes, by what stands there.
  const bestRows = () => {
    if (kv.y === null) return [];
    const means = kv.allRows.filter(kv.isMean);
    const fronts = [...kv.front(means.length ? means : kv.allRows, kv.x, kv.y).values()].sort(
        (a, b) => b.length - a.length);
    if (fronts.length === 0) return [];
    const front = fronts[0], ratio = (r) => kv.num("memory.memory_ratio", r);
    const out = new Map();
    const say = (row, text) => out.set(row, [...(out.get(row) || []), text]);
    for (const share of [0.5, 0.25, 0.1]) {
      const under = front.filter((r) => ratio(r) !== null && ratio(r) <= share);
      if (under.length) say(under[under.length - 1], `with at most ${100 * share} % of the bytes`);
    }
    if (out.size === 0) say(front[front.length - 1], "of all");
    const group = kv.allRows.filter((r) => kv.groupKey(r) === kv.groupKey(front[0]));
    const count = `${front.length} of ${kv.plural(group.length, "row")} ${
                      front.length === 1 ? "is" : "are"} on the Pareto front of ` +
        `${kv.shortName(kv.x)} against ${kv.shortName(kv.y)}` +
        (fronts.length > 1 ? `, ${kv.groupName(front[0])} (${fronts.length} such groups)` : "") +
        ". Best:";
    return [
      kv.make("p", {}, count),
      kv.make(
          "ul", {},
          ...[...out].map(
              ([row, when]) => kv.make("li", {}, `${when.join(" and ")} `, ...inWords(row))))
    ];
  };
  const drawSummary = () => {
    const failed = kv.allRows.filter((r) => !kv.good(r)).length;
    const paragraphs = [kv.make("p", {class: "lead"}, whatWasRun()), ...bestRows()];
    if (failed)
      paragraphs.push(
          kv.make("p", {class: "warning"}, `${kv.plural(failed, "row")} failed: see the notes.`));
    if (kv.allRows.some((r) => kv.text("mode", r) === "open"))
      paragraphs.push(kv.make("p", {class: "honest"}, honest));
    kv.at("summary").replaceChildren(...paragraphs);
  };

  const drawNotes = () => {
    const partsOf = (row) => {
      const note = kv.text("note", row);
      return kv.good(row) ? note.split("; ").filter(Boolean) : [`failed: ${note}`];
    };
    const pairs = kv.allRows.flatMap((row) => partsOf(row).map((part) => ({part, row})));
    const about = [...kv.groupBy(pairs, (p) => p.part)].map(
        ([text, group]) => [text, group.map((p) => p.row)]);
    const most = 60;
    const lines = about.slice(0, most).map(([text, rows]) => {
      const who = rows.length === kv.count && kv.count > 1 ? "all rows"
          : rows.length > 4 ? `${kv.labels[rows[0]]} and ${rows.length - 1} more`
                            : rows.map((r) => kv.labels[r]).join("; ");
      return kv.make("li", {}, `${text} \u2014 ${who}`);
    });
    if (about.length > most)
      lines.push(kv.make("li", {}, `and ${about.length - most} more: show the column "note"`));
    const partial = kv.distinct((r) => kv.text("layers", r), kv.allRows).filter((l) => {
      const parts = l.match(/^(\d+)\/(\d+)$/);
      return parts && parts[1] !== parts[2];
    });
    if (partial.length)
      lines.unshift(kv.make(
          "li", {}, `layers ${partial.join(", ")}: bytes and quality are of the recorded layers`));
    kv.at("notes").replaceChildren(...lines);
    kv.at("notes-card").hidden = lines.length === 0;
  };

  const drawFiles = () => {
    const traces =
        kv.distinct(
              (r) => JSON.stringify(
                  [kv.text("trace", r), kv.num("sequence", r), kv.text("trace_fingerprint", r)]),
              kv.allRows.filter((r) => !kv.isMean(r)))
            .map((t) => JSON.parse(t));
    const term = (name, value) =>
        (value === "" || value === 0 ? []
                                     : [kv.make("dt", {}, name), kv.make("dd", {}, String(value))]);
    const file = (f) => kv.make(
        "dl", {class: "provenance"},
        ...term("rows", f.rows ? `${f.first + 1} to ${f.first + f.rows}` : "none"),
        ...term("command", f.command),
        ...term("kvreplay", [f.version, f.revision].filter(Boolean).join(", revision ")),
        ...term("device", [f.device, f.cpu].filter(Boolean).join(", ")),
        ...term("threads", f.threads), ...term("compiler", f.compiler), ...term("HDF5", f.hdf5),
        ...term("CUDA", f.cuda));
    const most = 12;
    const list = traces.slice(0, most).flatMap(
        ([path, sequence, print]) =>
            term("trace", `${path}, sequence ${sequence}${print ? `, fingerprint ${print}` : ""}`));
    if (traces.length > most) list.push(...term("", `and ${traces.length - most} more`));
    kv.at("files").replaceChildren(
        ...kv.files.map(file), kv.make("dl", {class: "provenance"}, ...list));
  };

  const startFilter = () => {
    const count = () => {
      kv.at("filter-count").textContent = kv.visible.length === kv.count
          ? kv.plural(kv.count, "row")
          : `${kv.visible.length} of ${kv.count} rows`;
    };
    let waiting = null;
    kv.at("filter").addEventListener("input", (e) => {
      clearTimeout(waiting);
      waiting = setTimeout(() => {
        kv.filterText = e.target.value;
        kv.applyFilter();
        count();
        kv.tell("filter");
      }, kv.count > 2000 ? 250 : 60);
    });
    kv.on("axes", () => {
      kv.applyFilter();
      count();
    });
    kv.at("filter").value = kv.filterText;
    kv.applyFilter();
    count();
  };

  const startTheme = () => {
    const button = kv.at("theme");
    const redraw = () => {
      button.textContent = kv.isDark() ? "Light" : "Dark";
      kv.tell("theme");
    };
    button.addEventListener("click", () => {
      document.documentElement.dataset.theme = kv.isDark() ? "light" : "dark";
      redraw();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    const print = (on) => {
      if (on === kv.printing()) return;
      if (on)
        document.documentElement.dataset.print = "yes";
      else
        delete document.documentElement.dataset.print;
      redraw();
    };
    // The events come before the pages are laid out; the query is for viewers that only change the
    // medium.
    addEventListener("beforeprint", () => print(true));
    addEventListener("afterprint", () => print(false));
    matchMedia("print").addEventListener("change", (e) => print(e.matches));
    button.textContent = kv.isDark() ? "Light" : "Dark";
  };

  // Chosen at first, so that no chart is idle: the best row of each policy, those on the front
  // first; in focus one with a gate, where there is one.
  const firstChoice = () => {
    const detailed = kv.allRows.filter((r) => kv.details(r).series);
    const cut = detailed.filter((r) => kv.num("memory.memory_ratio", r) < 0.99);
    const front = cut.filter((r) => kv.frontRows.has(r)).reverse();
    const one = new Map();
    for (const row of [...front, ...cut, ...detailed])
      if (!one.has(kv.text("name", row))) one.set(kv.text("name", row), row);
    const gated = (r) => kv.num("confidence.tau", r) !== null;
    const rows = [...one.values()];
    kv.chosen =
        [...rows.filter(gated).slice(0, 2), ...rows.filter((r) => !gated(r))].slice(0, 4).reverse();
    kv.focus = kv.chosen.length ? kv.chosen[kv.chosen.length - 1] : null;
  };

  kv.updateFront();
  startFilter();
  firstChoice();
  drawSummary();
  drawNotes();
  drawFiles();
  kv.startTable();
  kv.startScatter();
  kv.startSteps();
  kv.startSizes();
  kv.startHeat();
  startTheme();
  kv.on("axes", drawSummary);
  document.documentElement.dataset.ready = "yes";
})();
