// Heat maps on plain canvases: layer by head, and needles by length and depth.
"use strict";
(() => {
  // Viridis at eighths: equal steps look equal, and colour-blind readers see the order.
  const scale = [[68, 1, 84], [72, 40, 120], [62, 74, 137], [49, 104, 142], [38, 130, 142], [31, 158, 137], [53, 183, 121],
    [109, 205, 89], [253, 231, 37]];
  const colourOf = (share) => {
    const at = Math.max(0, Math.min(0.999999, share)) * (scale.length - 1), i = Math.floor(at), f = at - i;
    return `rgb(${scale[i].map((c, k) => Math.round(c + f * (scale[i + 1][k] - c))).join(",")})`;
  };

  // map: {title, columns: [names], rows: [names], columnTitle, rowTitle, values [rows][columns] or null, show}
  const heatMap = (map) => {
    const flat = map.values.flat().filter((v) => v !== null);
    const low = Math.min(...flat), high = Math.max(...flat);
    const share = (v) => (high > low ? (v - low) / (high - low) : 0.5);
    const reading = kv.make("div", { class: "reading", "aria-live": "polite" });
    const range = flat.length ? `${map.show(low)} to ${map.show(high)}` : "nothing measured";
    const canvas = kv.make("canvas", { role: "application", tabindex: "0",
      "aria-label": `${map.title}: ${map.rowTitle} by ${map.columnTitle}, ${range}. Arrow keys read the cells; the table below has all.` });
    let cell = null;
    const say = () => {
      const text = cell === null ? `dark ${map.show(low)}, bright ${map.show(high)}`
        : `${map.columnTitle} ${map.columns[cell.column]}, ${map.rowTitle} ${map.rows[cell.row]}: ` +
          (map.values[cell.row][cell.column] === null ? "not measured" : map.show(map.values[cell.row][cell.column]));
      reading.textContent = flat.length ? text : "not measured";
    };
    const left = 46, top = 4, bottom = 20, legend = 16;
    const height = Math.max(12, Math.min(26, 220 / map.rows.length));
    const draw = () => {
      const width = canvas.clientWidth || 300, total = top + map.rows.length * height + bottom, ratio = devicePixelRatio || 1;
      canvas.width = width * ratio;
      canvas.height = total * ratio;
      canvas.style.height = `${total}px`;
      const g = canvas.getContext("2d");
      g.scale(ratio, ratio);
      g.font = `11px ${getComputedStyle(document.body).fontFamily}`;
      const cellWidth = (width - left - legend - 10) / map.columns.length;
      map.values.forEach((line, y) => line.forEach((v, x) => {
        g.fillStyle = v === null ? kv.variable("grid") : colourOf(share(v));
        g.fillRect(left + x * cellWidth, top + y * height, Math.max(0.5, cellWidth - (cellWidth > 4 ? 1 : 0)), height - 1);
      }));
      if (cell) {
        g.strokeStyle = kv.variable("ink");
        g.lineWidth = 2;
        g.strokeRect(left + cell.column * cellWidth, top + cell.row * height, cellWidth - 1, height - 1);
      }
      g.fillStyle = kv.variable("soft");
      g.textAlign = "right";
      map.rows.forEach((name, y) => g.fillText(name, left - 6, top + (y + 0.5) * height + 4));
      g.textAlign = "center";
      const every = Math.max(1, Math.ceil(34 / cellWidth));
      map.columns.forEach((name, x) => x % every === 0 && g.fillText(name, left + (x + 0.5) * cellWidth, total - 5));
      for (let i = 0; i < 40; i += 1) {
        g.fillStyle = colourOf(1 - i / 39);
        g.fillRect(width - legend, top + (i / 40) * map.rows.length * height, legend, (map.rows.length * height) / 40 + 0.5);
      }
      canvas.cells = { left, top, cellWidth, height };
    };
    const to = (column, row) => {
      cell = { column: Math.max(0, Math.min(map.columns.length - 1, column)), row: Math.max(0, Math.min(map.rows.length - 1, row)) };
      draw();
      say();
    };
    canvas.addEventListener("mousemove", (e) => {
      const { left: l, top: t, cellWidth } = canvas.cells, column = Math.floor((e.offsetX - l) / cellWidth), row = Math.floor((e.offsetY - t) / height);
      if (column >= 0 && column < map.columns.length && row >= 0 && row < map.rows.length) to(column, row);
    });
    canvas.addEventListener("mouseleave", () => { cell = null; draw(); say(); });
    canvas.addEventListener("keydown", (e) => {
      const by = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[e.key];
      if (!by) return;
      to(cell ? cell.column + by[0] : 0, cell ? cell.row + by[1] : 0);
      e.preventDefault();
    });
    new ResizeObserver(draw).observe(canvas);
    say();
    return { draw, element: kv.make("div", { class: "heat" }, kv.make("h3", {}, map.title), canvas, reading, asTable(map)) };
  };
  // Drawn at once, not only when the observer comes to it: a print does not wait.
  const place = (id, maps) => {
    const made = maps.map(heatMap);
    kv.at(id).replaceChildren(...made.map((m) => m.element));
    made.forEach((m) => m.draw());
  };
  // Filled when it is opened: a map of a large model has a thousand cells.
  const asTable = (map) => {
    const details = kv.make("details", { class: "hint" }, kv.make("summary", {}, "as a table"));
    details.addEventListener("toggle", () => {
      if (!details.open || details.querySelector("table")) return;
      const head = kv.make("tr", {}, kv.make("th", { scope: "col" }, `${map.rowTitle} / ${map.columnTitle}`),
        ...map.columns.map((c) => kv.make("th", { scope: "col" }, c)));
      const body = map.values.map((line, y) => kv.make("tr", {}, kv.make("th", { scope: "row" }, map.rows[y]),
        ...line.map((v) => kv.make("td", {}, v === null ? "" : map.show(v)))));
      details.append(kv.make("div", { class: "scroll" }, kv.make("table", {}, kv.make("thead", {}, head), kv.make("tbody", {}, ...body))));
    });
    return details;
  };

  const hasHeads = (r) => Boolean(kv.details(r).heads);
  const drawHeads = () => {
    const row = kv.drawnRow(hasHeads);
    const reason = row !== null ? "" : kv.visible.some(hasHeads) ? "choose a row that has details"
      : "no row has numbers per head (results of kvreplay replay -o FILE.json have, of the first rows and those on the Pareto front)";
    if (!kv.showCard("heads", "Layer by head", reason)) return;
    const heads = kv.details(row).heads;
    kv.at("heads-caption").textContent = `Of ${kv.labels[row]}, ${kv.groupName(row)}: means over the scored steps; every column is a layer, every row a KV head.`;
    const map = (title, cells, show) => ({
      title, show, columnTitle: "layer", rowTitle: "head", columns: heads.layers.map(String),
      rows: Array.from({ length: heads.kv_heads }, (_, h) => String(h)),
      values: Array.from({ length: heads.kv_heads }, (_, h) => heads.layers.map((_layer, l) => cells[l * heads.kv_heads + h])),
    });
    const maps = [map("Entries held", heads.entries, (v) => kv.digits(v)), map("Attention recall", heads.attention_recall, (v) => kv.digits(v)),
      map("Output error (relative L2)", heads.output_rel_l2, (v) => kv.digits(v))];
    place("heads", maps.filter((m) => m.values.flat().some((v) => v !== null)));
  };

  const needleMetric = () => ["quality.answer_accuracy", "quality.evidence_kept", "quality.kept_share.needle"].find(kv.has);
  const hasNeedle = (r) => kv.good(r) && Boolean(kv.details(r).needle) && kv.num(needleMetric(), r) !== null;
  const depths = 10;
  const drawNeedle = () => {
    const metric = needleMetric(), rows = metric ? kv.visible.filter(hasNeedle) : [];
    if (!kv.showCard("needle", "Needle grid", rows.length ? "" : "no row is of a trace with a `needle` span")) return;
    const policies = kv.distinct((r) => kv.labels[r], rows), picker = kv.at("needle-policy");
    const wanted = policies.includes(picker.value) ? picker.value : policies[0];
    picker.replaceChildren(...policies.slice(0, 200).map((p) => kv.make("option", { value: p, selected: p === wanted }, kv.shorten(p))));
    const lengths = kv.distinct((r) => kv.num("tokens.prompt", r), rows).sort((a, b) => a - b);
    const sums = Array.from({ length: depths }, () => lengths.map(() => [0, 0]));
    for (const r of rows.filter((q) => kv.labels[q] === wanted)) {
      const prompt = kv.num("tokens.prompt", r), depth = Math.min(depths - 1, Math.floor((depths * kv.details(r).needle[0]) / Math.max(1, prompt)));
      const sum = sums[depth][lengths.indexOf(prompt)];
      sum[0] += kv.num(metric, r);
      sum[1] += 1;
    }
    place("needle", [{
      title: `Mean ${kv.shortName(metric)}`, columnTitle: "prompt length", rowTitle: "depth", columns: lengths.map(String), show: (v) => kv.digits(v),
      rows: Array.from({ length: depths }, (_, d) => `${(100 * d) / depths} %`), values: sums.map((line) => line.map(([sum, n]) => (n ? sum / n : null))),
    }]);
    kv.at("needle-caption").textContent = `Where the needle begins, as a share of the prompt, in steps of ${100 / depths} %. Empty: not run.`;
  };

  kv.startHeat = () => {
    kv.at("needle-policy").addEventListener("change", drawNeedle);
    kv.on("choice filter theme", drawHeads);
    kv.on("filter theme", drawNeedle);
    drawHeads();
    drawNeedle();
  };
})();
