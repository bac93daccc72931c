// Heat maps on plain canvases: layer by head, and needles by length and depth.
"use strict";
(() => {
  // Viridis at eighths: equal steps look equal, and colour-blind readers see the order.
  const scale = [
    [68, 1, 84],
    [72, 40, 120],
    [62, 74, 137],
    [49, 104, 142],
    [38, 130, 142],
    [31, 158, 137],
    [53, 183, 121],
    [109, 205, 89],
    [253, 231, 37],
  ];
  const colourOf = (share) => {
    const at = Math.max(0, Math.min(0.999999, share)) * (scale.length - 1);
    const i = Math.floor(at), f = at - i;
    const mixed = scale[i].map((c, k) => Math.round(c + f * (scale[i + 1][k] - c)));
    return `rgb(${mixed.join(",")})`;
  };
  const within = (value, count) => Math.max(0, Math.min(count - 1, value));
  const left = 46, top = 4, bottom = 20, legend = 16, gap = 10;  // pixels around the cells
  const arrows = {ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1]};

  // map: title, columnTitle, rowTitle, columns and rows (names), values [rows][columns] with null
  // where nothing was measured, show (a number as text).
  class HeatMap {
    constructor(map) {
      this.map = map;
      this.cell = null;
      this.height = Math.max(12, Math.min(26, 220 / map.rows.length));
      const measured = map.values.flat().filter((v) => v !== null);
      this.low = Math.min(...measured);
      this.high = Math.max(...measured);
      this.canvas = kv.make("canvas", {
        role: "application",
        tabindex: "0",
        "aria-label": `${map.title}: ${map.rowTitle} by ${map.columnTitle}, ${this.range()}. ` +
            "Arrow keys read the cells; the table below has all.",
        on: {
          mousemove: (e) => this.hover(e),
          mouseleave: () => this.go(null),
          keydown: (e) => this.walk(e),
        },
      });
      this.reading = kv.make("div", {class: "reading", "aria-live": "polite"}, this.range());
      this.element = kv.make(
          "div", {class: "heat"}, kv.make("h3", {}, map.title), this.canvas, this.reading,
          asTable(map));
      new ResizeObserver(() => this.draw()).observe(this.canvas);
    }

    range() {
      return `dark ${this.map.show(this.low)}, bright ${this.map.show(this.high)}`;
    }
    textOf({column, row}) {
      const {map} = this, value = map.values[row][column];
      return `${map.columnTitle} ${map.columns[column]}, ${map.rowTitle} ${map.rows[row]}: ` +
          (value === null ? "not measured" : map.show(value));
    }
    colour(value) {
      if (value === null) return kv.variable("grid");
      return colourOf(this.high > this.low ? (value - this.low) / (this.high - this.low) : 0.5);
    }

    // A canvas of as many pixels as the screen has there; draws in units of the page.
    draw() {
      const width = this.canvas.clientWidth || 300, ratio = devicePixelRatio || 1;
      const height = top + this.map.rows.length * this.height + bottom;
      this.canvas.width = width * ratio;
      this.canvas.height = height * ratio;
      this.canvas.style.height = `${height}px`;
      this.width = (width - left - legend - gap) / this.map.columns.length;
      const g = this.canvas.getContext("2d");
      g.scale(ratio, ratio);
      g.font = `11px ${getComputedStyle(document.body).fontFamily}`;
      this.drawCells(g);
      this.drawNames(g, height);
      this.drawLegend(g, width);
    }
    drawCells(g) {
      const line = this.width > 4 ? 1 : 0;  // between cells, where there is room
      this.map.values.forEach((values, row) => values.forEach((value, column) => {
        g.fillStyle = this.colour(value);
        const x = left + column * this.width, y = top + row * this.height;
        g.fillRect(x, y, Math.max(0.5, this.width - line), this.height - 1);
      }));
      if (this.cell === null) return;
      const {column, row} = this.cell;
      g.strokeStyle = kv.variable("ink");
      g.lineWidth = 2;
      g.strokeRect(
          left + column * this.width, top + row * this.height, this.width - 1, this.height - 1);
    }
    drawNames(g, height) {
      g.fillStyle = kv.variable("soft");
      g.textAlign = "right";
      this.map.rows.forEach((name, row) => {
        g.fillText(name, left - 6, top + (row + 0.5) * this.height + 4);
      });
      g.textAlign = "center";
      const every = Math.max(1, Math.ceil(34 / this.width));
      this.map.columns.forEach((name, column) => {
        if (column % every > 0) return;
        g.fillText(name, left + (column + 0.5) * this.width, height - 5);
      });
    }
    drawLegend(g, width) {
      const steps = 40, height = (this.map.rows.length * this.height) / steps;
      for (let i = 0; i < steps; i += 1) {
        g.fillStyle = colourOf(1 - i / (steps - 1));
        g.fillRect(width - legend, top + i * height, legend, height + 0.5);
      }
    }

    go(cell) {
      this.cell = cell;
      this.draw();
      this.reading.textContent = cell === null ? this.range() : this.textOf(cell);
    }
    hover(event) {
      const column = Math.floor((event.offsetX - left) / this.width);
      const row = Math.floor((event.offsetY - top) / this.height);
      const {columns, rows} = this.map;
      if (column === within(column, columns.length) && row === within(row, rows.length)) {
        this.go({column, row});
      }
    }
    walk(event) {
      const by = arrows[event.key];
      if (by === undefined) return;
      const {column, row} = this.cell ?? {column: -by[0], row: -by[1]};
      this.go({
        column: within(column + by[0], this.map.columns.length),
        row: within(row + by[1], this.map.rows.length),
      });
      event.preventDefault();
    }
  }

  // Filled when it is opened: a map of a large model has a thousand cells.
  const asTable = (map) => {
    const details = kv.make("details", {class: "hint"}, kv.make("summary", {}, "as a table"));
    const heading = (scope) => (text) => kv.make("th", {scope}, text);
    details.addEventListener("toggle", () => {
      if (!details.open || details.querySelector("table")) return;
      const names = [`${map.rowTitle} / ${map.columnTitle}`, ...map.columns];
      const head = kv.make("tr", {}, ...names.map(heading("col")));
      const lines = map.values.map(
          (values, row) => kv.make(
              "tr", {}, heading("row")(map.rows[row]),
              ...values.map((v) => kv.make("td", {}, v === null ? "" : map.show(v)))));
      const table =
          kv.make("table", {}, kv.make("thead", {}, head), kv.make("tbody", {}, ...lines));
      details.append(kv.make("div", {class: "scroll"}, table));
    });
    return details;
  };
  // Drawn at once, not only when the observer comes to it: a print does not wait.
  const place = (id, maps) => {
    const made =
        maps.filter((m) => m.values.flat().some((v) => v !== null)).map((m) => new HeatMap(m));
    kv.at(id).replaceChildren(...made.map((m) => m.element));
    made.forEach((m) => m.draw());
  };

  // ---- layer by head ----
  const hasHeads = (r) => Boolean(kv.details(r).heads);
  const drawHeads = () => {
    const row = kv.drawnRow(hasHeads);
    const reason = row !== null     ? ""
        : kv.visible.some(hasHeads) ? "choose a row that has details"
                                    : kv.noDetails;
    if (!kv.showCard("heads", "Layer by head", reason)) return;
    const heads = kv.details(row).heads, count = heads.kv_heads;
    const numbers = Array.from({length: count}, (_, head) => head);
    kv.at("heads-caption").textContent = `Of ${kv.labels[row]}, ${kv.groupName(row)}: means over ` +
        "the scored steps; every column is a layer, every row a KV head.";
    const map = (title, cells) => ({
      title,
      columnTitle: "layer",
      rowTitle: "head",
      columns: heads.layers.map(String),
      rows: numbers.map(String),
      values: numbers.map((head) => heads.layers.map((_, layer) => cells[layer * count + head])),
      show: (v) => kv.digits(v),
    });
    place("heads", [
      map("Entries held", heads.entries),
      map("Attention recall", heads.attention_recall),
      map("Output error (relative L2)", heads.output_rel_l2),
    ]);
  };

  // ---- needles ----
  const depths = 10;
  const mostPolicies = 200;
  const needleMetric = ["answer_accuracy", "evidence_kept", "kept_share.needle"]
                           .map((name) => `quality.${name}`)
                           .find(kv.has);
  const hasNeedle = (r) =>
      kv.good(r) && Boolean(kv.details(r).needle) && kv.num(needleMetric, r) !== null;
  const lengthOf = (r) => kv.num("tokens.prompt", r);
  const depthOf = (r) =>
      within(Math.floor((depths * kv.details(r).needle[0]) / Math.max(1, lengthOf(r))), depths);
  const mean = (rows) => rows.reduce((sum, r) => sum + kv.num(needleMetric, r), 0) / rows.length;
  const drawNeedle = () => {
    const rows = needleMetric === undefined ? [] : kv.visible.filter(hasNeedle);
    const reason = rows.length > 0 ? "" : "no row is of a trace with a `needle` span";
    if (!kv.showCard("needle", "Needle grid", reason)) return;
    const policies = kv.distinct((r) => kv.labels[r], rows).slice(0, mostPolicies);
    const picker = kv.at("needle-policy");
    const wanted = policies.includes(picker.value) ? picker.value : policies[0];
    picker.replaceChildren(...policies.map(
        (p) => kv.make("option", {value: p, selected: p === wanted}, kv.shorten(p))));
    const own = kv.groupBy(
        rows.filter((r) => kv.labels[r] === wanted), (r) => `${lengthOf(r)} ${depthOf(r)}`);
    const lengths = kv.distinct(lengthOf, rows).sort((a, b) => a - b);
    const steps = Array.from({length: depths}, (_, depth) => depth);
    place("needle", [{
            title: `Mean ${kv.shortName(needleMetric)}`,
            columnTitle: "prompt length",
            rowTitle: "depth",
            columns: lengths.map(String),
            rows: steps.map((depth) => `${(100 * depth) / depths} %`),
            values: steps.map((depth) => lengths.map((length) => {
              const cell = own.get(`${length} ${depth}`);
              return cell ? mean(cell) : null;
            })),
            show: (v) => kv.digits(v),
          }]);
    kv.at("needle-caption").textContent =
        "Where the needle begins, as a share of the prompt, in steps of 10 %. Empty: not run.";
  };

  kv.startHeat = () => {
    kv.at("needle-policy").addEventListener("change", drawNeedle);
    kv.on("choice filter theme", drawHeads);
    kv.on("filter theme", drawNeedle);
    drawHeads();
    drawNeedle();
  };
})();
