// Quality against memory: a point per row, the front, hover and choice by mouse and keyboard.
"use strict";
(() => {
  const styles = ["circle", "triangle", "rect", "rectRot", "star", "crossRot"];
  const precisions = kv.distinct((r) => kv.text("precision", r), kv.allRows);
  const pointStyle = (row) => styles[precisions.indexOf(kv.text("precision", row)) % styles.length];
  const memoryAxes = [
    "memory.mean_bytes",
    "memory.memory_ratio",
    "memory.peak_bytes",
    "memory.peak_ratio",
    "memory.mean_entries",
    "memory.final_bytes",
  ].filter(kv.has);
  let chart = null;
  let points = [];  // rows that are drawn, by x: what the arrow keys walk through
  let place = -1;

  const point = (row) => ({x: kv.num(kv.x, row), y: kv.num(kv.y, row), row});
  const radius = (row) => {
    if (row === kv.focus) return 8;
    if (kv.chosen.includes(row)) return 6.5;
    return kv.count > 1500 ? 3 : 5;
  };
  const familySet = (rows) => {
    const colour = kv.policyColour(rows[0]), faint = `${colour}66`;
    const chosen = (r) => kv.chosen.includes(r);
    return {
      label: `${kv.text("name", rows[0])} (${kv.text("precision", rows[0])})`,
      data: rows.map(point),
      pointStyle: pointStyle(rows[0]),
      backgroundColor: rows.map((r) => (kv.frontRows.has(r) || chosen(r) ? colour : faint)),
      // A ring in the colour that the charts over the steps give the row.
      borderColor: rows.map((r) => (chosen(r) ? kv.chosenColour(r) : colour)),
      borderWidth: rows.map((r) => (chosen(r) ? 3 : 1)),
      radius: rows.map(radius),
      hoverRadius: 8,
      order: 1,
    };
  };
  const mostFronts = 12;
  const frontSet = (front, i) => {
    const label = i === 0 ? "Pareto front" : "";
    const unseen = {pointHitRadius: 0, hoverRadius: 0};
    return kv.lineSet(label, front.map(point), kv.variable("soft"), {
      ...unseen,
      type: "line",
      borderDash: [4, 4],
      borderWidth: 1.2,
      order: 2,
      front: true,
    });
  };
  const datasets = (fronts) => {
    const families =
        kv.groupBy(points, (r) => JSON.stringify([kv.text("name", r), kv.text("precision", r)]));
    const lines = fronts.filter((f) => f.length > 1).slice(0, mostFronts);
    return [...[...families.values()].map(familySet), ...lines.map(frontSet)];
  };

  const tooltip = {
    filter: (item) => !item.dataset.front,
    callbacks: {
      title: ([item]) => (item ? kv.shorten(kv.labels[item.raw.row], 90) : ""),
      label: ({raw}) => {
        const lines = [
          `${kv.shortName(kv.y)}: ${kv.show(kv.y, raw.y)}`,
          `${kv.shortName(kv.x)}: ${kv.show(kv.x, raw.x)}`,
          kv.groupName(raw.row),
        ];
        if (kv.frontRows.has(raw.row)) lines.push("on the Pareto front");
        return lines;
      },
    },
  };
  const direction = (column) => {
    if (!column.startsWith("quality.")) return "";
    return kv.higherIsBetter(column) ? ", more is better" : ", less is better";
  };
  const axisOf = (column, log) => {
    const bytes = /_bytes$/.test(column);
    const show = (v) => (bytes ? kv.roundBytes(v) : String(Number(v.toPrecision(3))));
    const highest = points.reduce((top, r) => Math.max(top, kv.num(column, r)), 0);
    const linear = bytes ? kv.byteTicks(highest) : {callback: show};
    return kv.axis(kv.shortName(column) + direction(column), {
      type: log ? "logarithmic" : "linear",
      ticks: log ? kv.logTicks(show) : linear,
    });
  };
  const caption = (scored, front) => {
    if (scored === 0) return "No row that passes the filter has both numbers.";
    const parts = [`${kv.plural(points.length, "row")}, ${front} on the front`];
    const lost = scored - points.length;
    if (lost > 0) parts.push(`${lost} at 0 cannot stand on a logarithmic axis`);
    const groups = kv.distinct(kv.groupKey, points).length;
    if (groups > 1) {
      parts.push(
          `${groups} traces, sequences or modes: a front for each, ` +
          "only rows of one group compare");
    }
    if (precisions.length > 1) parts.push("shape: precision");
    return `${parts.join("; ")}.`;
  };

  const drawScatter = () => {
    // A filter that nothing passes leaves the card, so that the controls stay.
    const reason = kv.y === null ? "no row was scored for quality" : "";
    if (!kv.showCard("scatter", "Quality against memory", reason)) return;
    const logX = kv.at("scatter-log-x").checked, logY = kv.at("scatter-log-y").checked;
    const x = (r) => kv.num(kv.x, r), y = (r) => kv.num(kv.y, r);
    const scored = kv.visible.filter((r) => kv.good(r) && x(r) !== null && y(r) !== null);
    points = scored.filter((r) => (!logX || x(r) > 0) && (!logY || y(r) > 0))
                 .sort((a, b) => x(a) - x(b) || a - b);
    place = -1;
    const fronts = [...kv.front(points, kv.x, kv.y).values()];
    const text = caption(scored.length, fronts.flat().length);
    kv.at("scatter-caption").textContent = text;
    const options = {
      parsing: false,
      scales: {x: axisOf(kv.x, logX), y: axisOf(kv.y, logY)},
      plugins: {tooltip, legend: {labels: {filter: (item) => item.text !== ""}}},
      onClick: (event, hits) => {
        const hit = hits.find((h) => !chart.data.datasets[h.datasetIndex].front);
        if (hit) kv.pick(chart.data.datasets[hit.datasetIndex].data[hit.index].row);
      },
      onHover: (event, hits) => {
        event.native.target.style.cursor = hits.length ? "pointer" : "";
      },
    };
    chart = kv.draw(
        "scatter", {type: "scatter", data: {datasets: datasets(fronts)}, options},
        `Scatter of ${kv.shortName(kv.y)} against ${kv.shortName(kv.x)}: ${text} Arrow keys walk ` +
            "through the points, Enter chooses one. The table below holds the same numbers.");
  };

  const hover = (row) => {
    const active = [];
    chart.data.datasets.forEach((set, datasetIndex) => {
      const index = set.front ? -1 : set.data.findIndex((p) => p.row === row);
      if (index >= 0) active.push({datasetIndex, index});
    });
    chart.setActiveElements(active);
    chart.tooltip.setActiveElements(active, {x: 0, y: 0});
    chart.update();
  };
  const walk = (event) => {
    const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    if (chart === null || points.length === 0) return;
    if (step !== undefined) {
      place = Math.max(0, Math.min(points.length - 1, place + step));
      hover(points[place]);
      kv.at("scatter-reading").textContent = kv.labels[points[place]];
      event.preventDefault();
    } else if (event.key === "Enter" && place >= 0) {
      kv.pick(points[place]);
      event.preventDefault();
    }
  };

  kv.startScatter = () => {
    const fill = (id, columns, current) => {
      const option = (c) =>
          kv.make("option", {value: c, selected: c === current}, kv.shorten(kv.shortName(c)));
      kv.at(id).replaceChildren(...columns.map(option));
    };
    fill("scatter-y", kv.metrics(), kv.y);
    fill("scatter-x", memoryAxes, kv.x);
    const canvas = kv.at("scatter");
    canvas.tabIndex = 0;
    canvas.setAttribute("role", "application");
    canvas.addEventListener("keydown", walk);
    for (const axis of ["x", "y"]) {
      kv.at(`scatter-${axis}`).addEventListener("change", (event) => {
        kv[axis] = event.target.value;
        kv.updateFront();
        kv.tell("axes");
      });
      kv.at(`scatter-log-${axis}`).addEventListener("change", drawScatter);
    }
    kv.on("filter axes theme choice", drawScatter);
    drawScatter();
  };
})();
