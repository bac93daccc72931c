// Charts over steps, over budgets, of confidences and of kernel times.
"use strict";
(() => {
  const points = (series) => series.step.map((x, i) => ({ x, y: series.value[i] }));
  const hasSeries = (row, name) => Boolean(kv.details(row).series?.[name]?.step.length);
  const seriesOf = (row, name) => kv.details(row).series[name];
  const stepsAxis = (extra = {}) => kv.axis("step (position in the text)", { type: "linear", ticks: { precision: 0 }, ...extra });
  const span = (rows, name) => {
    const steps = rows.flatMap((r) => { const s = seriesOf(r, name).step; return [s[0], s[s.length - 1]]; });
    return { min: Math.min(...steps), max: Math.max(...steps) };
  };
  const withDetails = (name) => kv.visible.some((r) => hasSeries(r, name)) || kv.chosen.some((r) => hasSeries(r, name));
  const noDetails = "no row has what it needs per step (results of kvreplay replay -o FILE.json have, of the first rows and those on the Pareto front)";
  const valueAt = (series, step) => {
    let i = series.step.findIndex((s) => s >= step);
    if (i <= 0) return series.value[i < 0 ? series.value.length - 1 : 0];
    const share = (step - series.step[i - 1]) / (series.step[i] - series.step[i - 1]);
    return series.value[i - 1] + share * (series.value[i] - series.value[i - 1]);
  };
  // Steps from which another budget holds. A gate's budget is flat between them.
  const switches = (row) => {
    if (!hasSeries(row, "budget") || !kv.has("confidence.tau") || kv.num("confidence.tau", row) === null) return [];
    const { step, value } = seriesOf(row, "budget");
    return step.filter((s, i) => i > 0 && value[i] !== value[i - 1]);
  };

  const drawSteps = () => {
    const has = (r) => hasSeries(r, "bytes");
    const pairs = kv.chosen.map((chosen) => ({ chosen, row: kv.standIn(chosen, has) })).filter((p) => p.row !== null);
    const rows = pairs.map((p) => p.row), focus = pairs.find((p) => p.chosen === kv.focus)?.row ?? null;
    const reason = rows.length ? "" : withDetails("bytes") ? "choose a row that has details" : noDetails;
    if (!kv.showCard("steps", "Memory over the steps", reason)) return;
    const line = ({ chosen, row }) => ({
      label: kv.shorten(kv.labels[row]) + (row === chosen ? "" : ` (${kv.sequenceName(row)}, ${kv.text("mode", row)})`),
      data: points(seriesOf(row, "bytes")), showLine: true, pointRadius: 0, pointStyle: "line",
      borderColor: kv.chosenColour(chosen), backgroundColor: kv.chosenColour(chosen), borderWidth: chosen === kv.focus ? 2.4 : 1.5,
    });
    const full = kv.distinct((r) => JSON.stringify(kv.details(r).series.full_bytes || null), rows).filter((s) => s !== "null")
      .map((s) => ({
        label: "everything kept, FP16", data: points(JSON.parse(s)), showLine: true, pointRadius: 0, pointStyle: "line",
        borderColor: kv.variable("soft"), borderDash: [6, 5], borderWidth: 1.4,
      }));
    const at = focus === null ? [] : switches(focus);
    const marks = at.length && at.length <= 120 ? [{
      label: "budget switches", data: at.map((s) => ({ x: s, y: valueAt(seriesOf(focus, "bytes"), s) })), pointStyle: "triangle",
      radius: 4, backgroundColor: kv.variable("ink"), borderColor: kv.variable("ink"),
    }] : [];
    kv.at("steps-caption").textContent = [
      at.length ? `The gate of ${kv.shorten(kv.labels[focus])} switched its budget ${kv.plural(at.length, "time")}` +
        (marks.length ? "" : ", too often to mark") : "",
      "A jagged line is shown by its peaks. A click on the legend hides a line"].filter(Boolean).join(". ") + ".";
    const highest = Math.max(...[...rows.map((r) => seriesOf(r, "bytes")), ...rows.map((r) => kv.details(r).series.full_bytes)]
      .filter(Boolean).flatMap((s) => s.value));
    kv.draw("steps", {
      type: "scatter", data: { datasets: [...marks, ...pairs.map(line), ...full] },
      options: {
        parsing: false,
        scales: { x: stepsAxis(span(rows, "bytes")), y: kv.axis("bytes held", { beginAtZero: true, ticks: kv.byteTicks(highest) }) },
        interaction: { mode: "nearest", axis: "x", intersect: false },
        plugins: { tooltip: { callbacks: { label: (i) => `${i.dataset.label}: step ${i.raw.x}, ${kv.bytes(i.raw.y)}` } } },
      },
    }, `Bytes held over the steps by ${rows.map((r) => kv.labels[r]).join("; ")}. ${kv.at("steps-caption").textContent}`);
  };

  const drawConfidence = () => {
    const row = kv.drawnRow((r) => hasSeries(r, "confidence"));
    const reason = row !== null ? "" : withDetails("confidence") ? "choose a row that has details" : noDetails;
    if (!kv.showCard("confidence", "Confidence and budget over the steps", reason)) return;
    const tau = kv.num("confidence.tau", row), range = span([row], "confidence");
    const sets = [{
      label: "confidence", data: points(seriesOf(row, "confidence")), showLine: true, pointRadius: 0, pointStyle: "line",
      borderColor: kv.colour(0), borderWidth: 1.2, yAxisID: "y",
    }];
    if (tau !== null) {
      sets.push({ label: `tau ${kv.digits(tau)}`, data: [{ x: range.min, y: tau }, { x: range.max, y: tau }], showLine: true,
        pointRadius: 0, pointStyle: "line", borderColor: kv.variable("ink"), borderDash: [5, 4], borderWidth: 1.3, yAxisID: "y" });
    }
    const budget = hasSeries(row, "budget");
    if (budget) {
      sets.push({ label: "budget", data: points(seriesOf(row, "budget")), showLine: true, stepped: "before", pointRadius: 0,
        pointStyle: "line", borderColor: `${kv.colour(1)}99`, backgroundColor: `${kv.colour(1)}22`, fill: "origin", borderWidth: 1, yAxisID: "entries", order: 5 });
    }
    kv.at("confidence-caption").textContent = `Of ${kv.labels[row]}, ${kv.groupName(row)}` + (tau === null ? "; it has no gate." : ".");
    const scales = { x: stepsAxis(range), y: kv.axis("confidence", { min: 0, max: 1 }) };
    if (budget) scales.entries = kv.axis("budget (entries per head)", { position: "right", beginAtZero: true, grid: { drawOnChartArea: false } });
    kv.draw("confidence", { type: "scatter", data: { datasets: sets }, options: { parsing: false, scales,
      interaction: { mode: "nearest", axis: "x", intersect: false },
      plugins: { tooltip: { callbacks: { label: (i) => `${i.dataset.label}: step ${i.raw.x}, ${kv.digits(i.raw.y)}` } } } } },
    `Confidence${budget ? " and budget" : ""} over the steps. ${kv.at("confidence-caption").textContent}`);
  };

  const drawHistogram = () => {
    const has = (r) => Boolean(kv.details(r).confidence_histogram);
    const row = kv.drawnRow(has);
    const any = kv.visible.some(has);
    if (!kv.showCard("histogram", "How confident the steps are", row !== null ? "" : any ? "choose a row that has details" : noDetails)) return;
    const counts = kv.details(row).confidence_histogram, width = 1 / counts.length;
    const steps = counts.reduce((a, b) => a + b, 0);
    const tau = kv.num("confidence.tau", row), low = kv.num("confidence.low_share", row);
    kv.at("histogram-caption").textContent = `${kv.plural(steps, "step")}` + (tau === null ? "; this row has no gate."
      : `; below tau = ${kv.digits(tau)}: ${low === null ? "not measured" : kv.percent(low)}.`);
    kv.draw("histogram", {
      type: "bar",
      data: { datasets: [{ data: counts.map((y, i) => ({ x: (i + 0.5) * width, y })), backgroundColor: kv.colour(0), barPercentage: 1, categoryPercentage: 0.92 }] },
      options: {
        parsing: false,
        scales: { x: kv.axis("confidence", { type: "linear", min: 0, max: 1, offset: false }), y: kv.axis("steps", { beginAtZero: true, ticks: { precision: 0 } }) },
        plugins: { legend: { display: false }, tooltip: { callbacks: {
          title: (i) => `${kv.digits(i[0].raw.x - width / 2, 3)} to ${kv.digits(i[0].raw.x + width / 2, 3)}`, label: (i) => kv.plural(i.raw.y, "step") } } },
      },
      plugins: [kv.verticalLines(tau === null ? [] : [{ x: tau, text: `tau ${kv.digits(tau)}` }])],
    }, `Histogram of confidences: ${kv.at("histogram-caption").textContent}`);
  };

  // Rows of a family that no other of it beats with fewer entries: what its line goes through.
  const best = (rows, column) => {
    const sorted = [...rows].sort((a, b) => kv.num("memory.mean_entries", a) - kv.num("memory.mean_entries", b) ||
      kv.num(column, b) - kv.num(column, a));
    let top = -Infinity;
    return sorted.filter((r) => { const better = kv.num(column, r) > top; if (better) top = kv.num(column, r); return better; });
  };
  const drawRecall = () => {
    const recall = "quality.attention_recall", bound = "quality.recall_bound", entries = "memory.mean_entries";
    const rows = kv.visible.filter((r) => kv.good(r) && kv.num(recall, r) !== null && kv.num(entries, r) !== null);
    const families = new Map();
    for (const r of rows) {
      const key = JSON.stringify([kv.groupKey(r), kv.text("name", r), kv.text("precision", r)]);
      families.set(key, [...(families.get(key) || []), r]);
    }
    const curves = [...families.values()].filter((f) => f.length > 1);
    const reason = rows.length === 0 ? "no row has attention_recall"
      : curves.length === 0 ? "needs a policy at two budgets or more" : "";
    if (!kv.showCard("recall", "Recall against budget", reason)) return;
    const groups = kv.distinct(kv.groupKey, rows);
    const at = (column) => (r) => ({ x: kv.num(entries, r), y: kv.num(column, r), row: r });
    const sets = groups.slice(0, 6).map((g, i) => ({
      label: i === 0 ? "clairvoyant bound" : "",
      data: best(rows.filter((r) => kv.groupKey(r) === g && kv.num(bound, r) !== null), bound).map(at(bound)), showLine: true,
      pointRadius: 0, pointStyle: "line", borderColor: kv.variable("ink"), borderDash: [6, 5], borderWidth: 1.3,
    })).filter((s) => s.data.length > 1);
    const named = new Set();
    for (const family of families.values()) {
      const colour = kv.policyColour(family[0]), line = best(family, recall);
      const name = `${kv.text("name", family[0])} (${kv.text("precision", family[0])})`;
      sets.push({ label: named.has(name) ? "" : name, data: line.map(at(recall)),
        showLine: true, borderColor: colour, backgroundColor: colour, radius: 3, borderWidth: 1.6,
        borderDash: kv.text("precision", family[0]) === "fp16" ? [] : [2, 3] });
      named.add(name);
      const rest = family.filter((r) => !line.includes(r));
      if (rest.length) sets.push({ label: "", data: rest.map(at(recall)), backgroundColor: `${colour}55`, borderColor: `${colour}55`, radius: 2 });
    }
    kv.at("recall-caption").textContent = "Lines join the best of a policy at each size. The bound: every query head holds its own best " +
      `positions, as many as the policy holds.${groups.length > 1 ? ` ${groups.length} traces, sequences or modes are drawn together: filter for one.` : ""}`;
    kv.draw("recall", { type: "scatter", data: { datasets: sets }, options: { parsing: false,
      scales: { x: kv.axis("mean entries per head", { type: "linear" }), y: kv.axis("attention recall", { max: 1 }) },
      onClick: (e, hit) => { if (hit.length) kv.pick(sets[hit[0].datasetIndex].data[hit[0].index].row); },
      plugins: { legend: { labels: { filter: (i) => i.text !== "" } }, tooltip: { callbacks: {
        label: (i) => `${kv.shorten(kv.labels[i.raw.row])}: ${kv.digits(i.raw.y)} at ${kv.digits(i.raw.x)} entries` } } } } },
    `Attention recall against mean entries: ${kv.plural(families.size, "policy").replace("policys", "policies")}, ${kv.plural(rows.length, "row")}.`);
  };

  const kernels = ["append", "attend", "update_scores", "select", "age"];
  const mostBars = 24;
  const drawTimes = () => {
    const timed = kv.visible.filter((r) => kv.text("mode", r) === "time" && kernels.some((k) => kv.num(`time.${k}_us_p50`, r) !== null));
    if (!kv.showCard("times", "Kernel times of a step", timed.length ? "" : "no row of mode time (kvreplay time)")) return;
    const rows = timed.slice(0, mostBars);
    kv.at("times").parentElement.style.height = `${90 + 26 * rows.length}px`;
    const names = rows.map((r) => kv.shorten(`${kv.labels[r]} \u00d7 ${kv.num("time.batch", r) ?? 1}`, 34));
    kv.at("times-caption").textContent = "Microseconds of the median step, summed over layers and batch (\u00d7 batch)." +
      (timed.length > rows.length ? ` The first ${rows.length} of ${timed.length}: filter for others.` : "");
    kv.draw("times", { type: "bar",
      data: { labels: names, datasets: kernels.map((k, i) => ({ label: k, backgroundColor: kv.colour(i), data: rows.map((r) => kv.num(`time.${k}_us_p50`, r)) })) },
      options: { indexAxis: "y",
        scales: { x: kv.axis("\u00b5s", { stacked: true, beginAtZero: true }), y: kv.axis("", { stacked: true, title: { display: false } }) },
        onClick: (e, hit) => { if (hit.length) kv.pick(rows[hit[0].index]); },
        plugins: { tooltip: { callbacks: {
          title: (i) => kv.shorten(kv.labels[rows[i[0].dataIndex]], 90),
          label: (i) => `${i.dataset.label}: ${kv.digits(i.raw)} \u00b5s`,
          footer: (i) => { const r = rows[i[0].dataIndex]; return `step ${kv.digits(kv.num("time.step_us_p50", r))} \u00b5s, ${kv.digits(kv.num("time.speedup", r))} times the full cache's speed`; } } } } } },
    `Kernel times: ${rows.map((r, i) => `${names[i]} ${kv.digits(kv.num("time.step_us_p50", r))} microseconds`).join("; ")}.`);
  };

  kv.startLines = () => {
    const chosen = () => { drawSteps(); drawConfidence(); drawHistogram(); };
    const all = () => { drawRecall(); drawTimes(); };
    kv.on("choice filter theme", chosen);
    kv.on("filter theme", all);
    chosen();
    all();
  };
})();
