// What all charts share: their defaults, axes, and how one is drawn anew.
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
  kv.shorten = (text, most = 70) =>
      (text.length > most ? `${text.slice(0, most - 1)}\u2026` : text);

  // After a chart's own handler has returned: choosing draws the chart anew.
  kv.pick = (row) => setTimeout(() => {
    kv.choose(row);
    kv.reveal(row);
  });

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
    title: {display: true, text: title, color: kv.variable("soft")},
    grid: {color: kv.variable("grid")},
    ...more,
    ticks: {color: kv.variable("soft"), maxRotation: 0, ...more.ticks},
  });
  kv.roundBytes = (value) => kv.bytes(value).replace(/(\.[0-9]*?)0+ /, "$1 ").replace(". ", " ");
  kv.lineSet = (label, data, colour, more = {}) => ({
    label,
    data,
    borderColor: colour,
    backgroundColor: colour,
    showLine: true,
    pointRadius: 0,
    pointStyle: "line",
    borderWidth: 1.4,
    ...more,
  });
  // Ticks at round numbers of binary units.
  kv.byteTicks = (highest) => ({
    callback: kv.roundBytes,
    stepSize: highest > 0 ? 2 ** Math.ceil(Math.log2(highest / 7)) : undefined,
  });
  // A logarithmic axis marks 1, 2, 5 of each power of ten.
  kv.logTicks = (show) => ({
    callback: (value) => (
        [1, 2, 5].includes(Number(String(value.toExponential()).split("e")[0])) ? show(value) : ""),
  });
  // Vertical lines at x values, with a word each.
  kv.verticalLines = (lines) => ({
    id: "verticalLines",
    afterDatasetsDraw(chart) {
      const {ctx, chartArea: area, scales} = chart;
      ctx.save();
      ctx.strokeStyle = ctx.fillStyle = kv.variable("ink");
      ctx.font = `12px ${Chart.defaults.font.family}`;
      for (const {x, text} of lines) {
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
})();
