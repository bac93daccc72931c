// Charts common to all, and the scatter of quality against memory.
"use strict";
(() => {
  Chart.defaults.animation = false;
  Chart.defaults.responsive = true;
  Chart.defaults.maintainAspectRatio = false;
  Chart.defaults.font.family = getComputedStyle(document.body).fontFamily;
  Chart.defaults.plugins.legend.labels.usePointStyle = true;
  Chart.defaults.plugins.legend.labels.boxHeight = 7;
  Chart.defaults.interaction.mode = "nearest";

  // Names can be longer than the screen is wide.
  kv.shorten = (text, most = 70) => (text.length > most ? `${text.slice(0, most - 1)}\u2026` : text);

  const charts = new Map();
  // Draws `config` on canvas `id`, in place of what stood there.
  kv.draw = (id, config, alternative) => {
    Chart.defaults.color = kv.variable("soft");
    Chart.defaults.borderColor = kv.variable("grid");
    charts.get(id)?.destroy();
    const canvas = kv.at(id);
    canvas.setAttribute("aria-label", alternative);
    if (!canvas.hasAttribute("role")) canvas.setAttribute("role", "img");
    charts.set(id, new Chart(canvas, config));
    return charts.get(id);
  };
  kv.axis = (title, more = {}) => ({
    title: { display: true, text: title, color: kv.variable("soft") },
    grid: { color: kv.variable("grid") },
    ...more,
    ticks: { color: kv.variable("soft"), maxRotation: 0, ...more.ticks },
  });
  const roundBytes = (value) => kv.bytes(value).replace(/(\.[0-9]*?)0+ /, "$1 ").replace(". ", " ");
  // Ticks at round numbers of binary units.
  kv.byteTicks = (highest) => ({
    callback: roundBytes, stepSize: highest > 0 ? 2 ** Math.ceil(Math.log2(highest / 7)) : undefined,
  });
  // A logarithmic axis marks 1, 2, 5 of each power of ten.
  kv.logTicks = (show) => ({
    callback: (value) => ([1, 2, 5].includes(Number(String(value.toExponential()).split("e")[0])) ? show(value) : ""),
  });
  // Vertical lines at x values, with a word each.
  kv.verticalLines = (lines) => ({
    id: "verticalLines",
    afterDatasetsDraw(chart) {
      const { ctx, chartArea: area, scales } = chart;
      ctx.save();
      ctx.strokeStyle = ctx.fillStyle = kv.variable("ink");
      ctx.font = `12px ${Chart.defaults.font.family}`;
      for (const { x, text } of lines) {
        const at = scales.x.getPixelForValue(x);
        ctx.setLineDash([5, 4]);
        ctx.beginPath();
        ctx.moveTo(at, area.top);
        ctx.lineTo(at, area.bottom);
        ctx.stroke();
        const left = at > (area.left + area.right) / 2;
        ctx.textAlign = left ? "right" : "left";
        ctx.fillText(text, at + (left ? -5 : 5), area.top + 12);
      }
      ctx.restore();
    },
  });

  // ---- scatter ----
  const styles = ["circle", "triangle", "rect", "rectRot", "star", "crossRot"];
  const precisions = kv.distinct((r) => kv.text("precision", r), kv.allRows);
  const pointStyle = (row) => styles[precisions.indexOf(kv.text("precision", row)) % styles.length];
  const memoryAxes = ["memory.mean_bytes", "memory.memory_ratio", "memory.peak_bytes", "memory.peak_ratio",
    "memory.mean_entries", "memory.final_bytes"].filter(kv.has);
  let points = [];  // rows that are drawn, by x: what the arrow keys walk through
  let place = -1;

  const families = () => {
    const out = new Map();
    for (const row of points) {
      const key = JSON.stringify([kv.text("name", row), kv.text("precision", row)]);
      if (!out.has(key)) out.set(key, []);
      out.get(key).push(row);
    }
    return [...out.values()];
  };
  const point = (row) => ({ x: kv.num(kv.x, row), y: kv.num(kv.y, row), row });
  const familySet = (rows) => {
    const colour = kv.policyColour(rows[0]);
    const chosen = (r) => kv.chosen.includes(r);
    return {
      label: `${kv.text("name", rows[0])} (${kv.text("precision", rows[0])})`,
      data: rows.map(point),
      pointStyle: pointStyle(rows[0]),
      backgroundColor: rows.map((r) => (kv.frontRows.has(r) || chosen(r) ? colour : `${colour}66`)),
      // A ring in the colour that the charts over the steps give the row.
      borderColor: rows.map((r) => (chosen(r) ? kv.chosenColour(r) : colour)),
      borderWidth: rows.map((r) => (chosen(r) ? 3 : 1)),
      radius: rows.map((r) => (r === kv.focus ? 8 : chosen(r) ? 6.5 : kv.count > 1500 ? 3 : 5)),
      hoverRadius: 8,
      order: 1,
    };
  };
  const frontSets = () => [...kv.front(points, kv.x, kv.y).values()].filter((f) => f.length > 1).slice(0, 12)
    .map((front, i) => ({
      label: i === 0 ? "Pareto front" : "", data: front.map(point), type: "line", pointRadius: 0, pointHitRadius: 0,
      hoverRadius: 0, borderColor: kv.variable("soft"), borderDash: [4, 4], borderWidth: 1.2, order: 2, front: true,
      pointStyle: "line",
    }));
  const tooltip = {
    filter: (item) => !item.dataset.front,
    callbacks: {
      title: (items) => (items.length ? kv.shorten(kv.labels[items[0].raw.row], 90) : ""),
      label: (item) => {
        const row = item.raw.row;
        return [`${kv.shortName(kv.y)}: ${kv.show(kv.y, item.raw.y)}`, `${kv.shortName(kv.x)}: ${kv.show(kv.x, item.raw.x)}`,
          kv.groupName(row), kv.frontRows.has(row) ? "on the Pareto front" : ""].filter(Boolean);
      },
    },
  };
  const axisOf = (column, box) => {
    const log = kv.at(box).checked, bytes = /_bytes$/.test(column);
    const show = (v) => (bytes ? roundBytes(v) : String(Number(v.toPrecision(3))));
    const linear = bytes ? kv.byteTicks(Math.max(...points.map((r) => kv.num(column, r)))) : { callback: show };
    return kv.axis(`${kv.shortName(column)}${column.startsWith("quality.") ? (kv.higherIsBetter(column) ? ", more is better" : ", less is better") : ""}`,
      { type: log ? "logarithmic" : "linear", ticks: log ? kv.logTicks(show) : linear });
  };
  const drawScatter = () => {
    const logX = kv.at("scatter-log-x").checked, logY = kv.at("scatter-log-y").checked;
    const all = kv.y === null ? [] : kv.visible.filter((r) => kv.good(r) && kv.num(kv.x, r) !== null && kv.num(kv.y, r) !== null);
    points = all.filter((r) => (!logX || kv.num(kv.x, r) > 0) && (!logY || kv.num(kv.y, r) > 0))
      .sort((a, b) => kv.num(kv.x, a) - kv.num(kv.x, b) || a - b);
    place = -1;
    const reason = kv.y === null ? "no row was scored for quality"
      : all.length === 0 ? "no row that passes the filter has both numbers" : "";
    // A filter that nothing passes leaves the card, so that the controls stay.
    if (!kv.showCard("scatter", "Quality against memory", kv.y === null ? reason : "")) return;
    const front = [...kv.front(points, kv.x, kv.y).values()].flat();
    const groups = kv.distinct(kv.groupKey, points).length;
    kv.at("scatter-caption").textContent = reason || [
      `${kv.plural(points.length, "row")}, ${front.length} on the front`,
      all.length > points.length ? `${all.length - points.length} at 0 cannot stand on a logarithmic axis` : "",
      groups > 1 ? `${groups} traces, sequences or modes: a front for each, only rows of one group compare` : "",
      precisions.length > 1 ? "shape: precision" : ""].filter(Boolean).join("; ") + ".";
    const chart = kv.draw("scatter", {
      type: "scatter",
      data: { datasets: [...families().map(familySet), ...frontSets()] },
      options: {
        parsing: false,
        scales: { x: axisOf(kv.x, "scatter-log-x"), y: axisOf(kv.y, "scatter-log-y") },
        plugins: { tooltip, legend: { labels: { filter: (item) => item.text !== "" } } },
        onClick: (event, hit) => {
          const at = hit.find((h) => !chart.data.datasets[h.datasetIndex].front);
          if (at) kv.pick(chart.data.datasets[at.datasetIndex].data[at.index].row);
        },
        onHover: (event, hit) => { event.native.target.style.cursor = hit.length ? "pointer" : ""; },
      },
    }, `Scatter of ${kv.shortName(kv.y)} against ${kv.shortName(kv.x)}: ${kv.at("scatter-caption").textContent} ` +
       "Arrow keys walk through the points, Enter chooses one. The table below holds the same numbers.");
  };
  // After the chart's own handler has returned: choosing draws it anew.
  kv.pick = (row) => setTimeout(() => { kv.choose(row); kv.reveal(row); });

  const walk = (event) => {
    const chart = charts.get("scatter");
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!chart || points.length === 0) return;
    if (step) {
      place = Math.max(0, Math.min(points.length - 1, place + step));
      const active = [];
      chart.data.datasets.forEach((set, datasetIndex) => set.front || set.data.forEach((p, index) => {
        if (p.row === points[place]) active.push({ datasetIndex, index });
      }));
      chart.setActiveElements(active);
      chart.tooltip.setActiveElements(active, { x: 0, y: 0 });
      chart.update();
      event.preventDefault();
    } else if (event.key === "Enter" && place >= 0) {
      kv.pick(points[place]);
      event.preventDefault();
    }
  };

  kv.startScatter = () => {
    const fill = (id, columns, current) => kv.at(id).replaceChildren(...columns.map((c) =>
      kv.make("option", { value: c, selected: c === current }, kv.shorten(kv.shortName(c)))));
    fill("scatter-y", kv.metrics(), kv.y);
    fill("scatter-x", memoryAxes, kv.x);
    const canvas = kv.at("scatter");
    canvas.tabIndex = 0;
    canvas.setAttribute("role", "application");
    canvas.addEventListener("keydown", walk);
    for (const [id, axis] of [["scatter-y", "y"], ["scatter-x", "x"]]) {
      kv.at(id).addEventListener("change", (e) => { kv[axis] = e.target.value; kv.updateFront(); kv.tell("axes"); });
    }
    for (const id of ["scatter-log-x", "scatter-log-y"]) kv.at(id).addEventListener("change", drawScatter);
    kv.on("filter axes theme choice", drawScatter);
    drawScatter();
  };
})();
