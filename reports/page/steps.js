// Charts over the steps: bytes held, confidence and budget; and the histogram of confidences.
"use strict";
(() => {
  const hasSeries = (row, name) => Boolean(kv.details(row).series?.[name]?.step.length);
  const seriesOf = (row, name) => kv.details(row).series[name];
  const pointsOf = (row, name) => {
    const {step, value} = seriesOf(row, name);
    return step.map((x, i) => ({x, y: value[i]}));
  };
  // Why a chart over the steps has nothing to draw.
  const reasonFor = (row, test) => {
    if (row !== null) return "";
    return kv.visible.some(test) ? "choose a row that has details" : kv.noDetails;
  };
  const stepsAxis = (rows, name) => {
    const ends = rows.flatMap((r) => [seriesOf(r, name).step[0], seriesOf(r, name).step.at(-1)]);
    return kv.axis("step (position in the text)", {
      type: "linear",
      min: Math.min(...ends),
      max: Math.max(...ends),
      ticks: {precision: 0},
    });
  };
  const overSteps = (scales, show) => ({
    parsing: false,
    scales,
    interaction: {mode: "nearest", axis: "x", intersect: false},
    plugins: {
      tooltip: {
        callbacks: {label: (i) => `${i.dataset.label}: step ${i.raw.x}, ${show(i.raw.y)}`},
      },
    },
  });

  // ---- bytes ----
  const valueAt = (series, step) => {
    const i = series.step.findIndex((s) => s >= step);
    if (i <= 0) return series.value.at(i);
    const share = (step - series.step[i - 1]) / (series.step[i] - series.step[i - 1]);
    return series.value[i - 1] + share * (series.value[i] - series.value[i - 1]);
  };
  // Steps from which another budget holds. A gate's budget is flat between them.
  const switches = (row) => {
    if (kv.num("confidence.tau", row) === null || !hasSeries(row, "budget")) return [];
    const {step, value} = seriesOf(row, "budget");
    return step.filter((s, i) => i > 0 && value[i] !== value[i - 1]);
  };
  const mostMarks = 120;
  const switchMarks = (row, at) => ({
    label: "budget switches",
    data: at.map((s) => ({x: s, y: valueAt(seriesOf(row, "bytes"), s)})),
    pointStyle: "triangle",
    radius: 4,
    backgroundColor: kv.variable("ink"),
    borderColor: kv.variable("ink"),
  });
  const bytesLine = ({chosen, row}) => {
    const other = row === chosen ? "" : ` (${kv.sequenceName(row)}, ${kv.text("mode", row)})`;
    return kv.lineSet(
        kv.shorten(kv.labels[row]) + other, pointsOf(row, "bytes"), kv.chosenColour(chosen),
        {borderWidth: chosen === kv.focus ? 2.4 : 1.5});
  };
  // One line for each text among the rows.
  const fullLines = (rows) => {
    const of = new Map(rows.filter((r) => hasSeries(r, "full_bytes"))
                           .map((r) => [JSON.stringify(seriesOf(r, "full_bytes")), r]));
    return [...of.values()].map(
        (r) => kv.lineSet(
            "everything kept, FP16", pointsOf(r, "full_bytes"), kv.variable("soft"),
            {borderDash: [6, 5]}));
  };
  const drawSteps = () => {
    const has = (r) => hasSeries(r, "bytes");
    const pairs = kv.chosen.map((chosen) => ({chosen, row: kv.standIn(chosen, has)}))
                      .filter((p) => p.row !== null);
    const rows = pairs.map((p) => p.row);
    const reason = reasonFor(rows.at(0) ?? null, has);
    if (!kv.showCard("steps", "Memory over the steps", reason)) return;
    const focus = pairs.find((p) => p.chosen === kv.focus)?.row ?? null;
    const at = focus === null ? [] : switches(focus);
    const marks = at.length > 0 && at.length <= mostMarks ? [switchMarks(focus, at)] : [];
    const many = at.length > mostMarks ? ", too often to mark" : "";
    const gate = at.length === 0
        ? ""
        : `The gate of ${kv.shorten(kv.labels[focus])} switched its budget ` +
            `${kv.plural(at.length, "time")}${many}. `;
    const caption =
        `${gate}A jagged line is shown by its peaks. A click on the legend hides a line.`;
    kv.at("steps-caption").textContent = caption;
    const datasets = [...marks, ...pairs.map(bytesLine), ...fullLines(rows)];
    const highest = Math.max(...datasets.flatMap((s) => s.data.map((p) => p.y)));
    const y = kv.axis("bytes held", {beginAtZero: true, ticks: kv.byteTicks(highest)});
    kv.draw(
        "steps", {
          type: "scatter",
          data: {datasets},
          options: overSteps({x: stepsAxis(rows, "bytes"), y}, kv.bytes),
        },
        `Bytes held over the steps by ${rows.map((r) => kv.labels[r]).join("; ")}. ${caption}`);
  };

  // ---- confidence ----
  const budgetSet = (row) => kv.lineSet("budget", pointsOf(row, "budget"), `${kv.colour(1)}99`, {
    backgroundColor: `${kv.colour(1)}22`,
    fill: "origin",
    stepped: "before",
    borderWidth: 1,
    yAxisID: "entries",
    order: 5,
  });
  const drawConfidence = () => {
    const has = (r) => hasSeries(r, "confidence");
    const row = kv.drawnRow(has);
    const title = "Confidence and budget over the steps";
    if (!kv.showCard("confidence", title, reasonFor(row, has))) return;
    const tau = kv.num("confidence.tau", row), data = pointsOf(row, "confidence");
    const datasets = [kv.lineSet("confidence", data, kv.colour(0), {borderWidth: 1.2})];
    const scales = {
      x: stepsAxis([row], "confidence"),
      y: kv.axis("confidence", {min: 0, max: 1}),
    };
    if (tau !== null) {
      const ends = [{x: data[0].x, y: tau}, {x: data.at(-1).x, y: tau}];
      datasets.push(
          kv.lineSet(`tau ${kv.digits(tau)}`, ends, kv.variable("ink"), {borderDash: [5, 4]}));
    }
    if (hasSeries(row, "budget")) {
      datasets.push(budgetSet(row));
      scales.entries = kv.axis(
          "budget (entries per head)",
          {position: "right", beginAtZero: true, grid: {drawOnChartArea: false}});
    }
    const caption =
        `Of ${kv.labels[row]}, ${kv.groupName(row)}${tau === null ? "; it has no gate" : ""}.`;
    kv.at("confidence-caption").textContent = caption;
    kv.draw(
        "confidence", {type: "scatter", data: {datasets}, options: overSteps(scales, kv.digits)},
        `${title}. ${caption}`);
  };

  const drawHistogram = () => {
    const has = (r) => Boolean(kv.details(r).confidence_histogram);
    const row = kv.drawnRow(has);
    if (!kv.showCard("histogram", "How confident the steps are", reasonFor(row, has))) return;
    const counts = kv.details(row).confidence_histogram, width = 1 / counts.length;
    const tau = kv.num("confidence.tau", row), low = kv.num("confidence.low_share", row);
    const below = low === null ? "not measured" : kv.percent(low);
    const gate = tau === null ? "this row has no gate" : `below tau = ${kv.digits(tau)}: ${below}`;
    const caption = `${kv.plural(counts.reduce((a, b) => a + b, 0), "step")}; ${gate}.`;
    kv.at("histogram-caption").textContent = caption;
    const dataset = {
      data: counts.map((y, i) => ({x: (i + 0.5) * width, y})),
      backgroundColor: kv.colour(0),
      barPercentage: 1,
      categoryPercentage: 0.92,
    };
    const edge = (item, side) => kv.digits(item.raw.x + side * width / 2, 3);
    const tooltip = {
      callbacks: {
        title: ([item]) => `${edge(item, -1)} to ${edge(item, 1)}`,
        label: (item) => kv.plural(item.raw.y, "step"),
      },
    };
    const options = {
      parsing: false,
      scales: {
        x: kv.axis("confidence", {type: "linear", min: 0, max: 1, offset: false}),
        y: kv.axis("steps", {beginAtZero: true, ticks: {precision: 0}}),
      },
      plugins: {legend: {display: false}, tooltip},
    };
    const marks = tau === null ? [] : [{x: tau, text: `tau ${kv.digits(tau)}`}];
    kv.draw(
        "histogram", {
          type: "bar",
          data: {datasets: [dataset]},
          options,
          plugins: [kv.verticalLines(marks)],
        },
        `Histogram of confidences: ${caption}`);
  };

  kv.startSteps = () => {
    const all = () => {
      drawSteps();
      drawConfidence();
      drawHistogram();
    };
    kv.on("choice filter theme", all);
    all();
  };
})();
