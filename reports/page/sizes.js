// Recall against the number of entries, and the kernels' times.
"use strict";
(() => {
  const recall = "quality.attention_recall", bound = "quality.recall_bound";
  const entries = "memory.mean_entries";

  // ---- recall ----
  // Rows that no other of them beats with fewer entries: what a line goes through.
  const best = (rows, column) => {
    const sorted = [...rows].sort(
        (a, b) => kv.num(entries, a) - kv.num(entries, b) || kv.num(column, b) - kv.num(column, a));
    let top = -Infinity;
    return sorted.filter((r) => {
      const better = kv.num(column, r) > top;
      if (better) top = kv.num(column, r);
      return better;
    });
  };
  const at = (column) => (r) => ({x: kv.num(entries, r), y: kv.num(column, r), row: r});
  const mostBounds = 6;
  const boundSets = (groups) => {
    const lines = [...groups.values()]
                      .map((rows) => best(rows.filter((r) => kv.num(bound, r) !== null), bound))
                      .filter((line) => line.length > 1);
    return lines.slice(0, mostBounds)
        .map(
            (line, i) => kv.lineSet(
                i === 0 ? "clairvoyant bound" : "", line.map(at(bound)), kv.variable("ink"),
                {borderDash: [6, 5]}));
  };
  // The line of a family's best rows, and faint points for the others.
  const familySets = (family, named) => {
    const first = family[0], colour = kv.policyColour(first),
          precision = kv.text("precision", first);
    const name = `${kv.text("name", first)} (${precision})`, line = best(family, recall);
    const sets = [kv.lineSet(named.has(name) ? "" : name, line.map(at(recall)), colour, {
      pointRadius: 3,
      pointStyle: "circle",
      borderWidth: 1.6,
      borderDash: precision === "fp16" ? [] : [2, 3],
    })];
    named.add(name);
    const on = new Set(line), rest = family.filter((r) => !on.has(r));
    if (rest.length > 0) {
      const faint = `${colour}55`;
      sets.push({
        label: "",
        data: rest.map(at(recall)),
        backgroundColor: faint,
        borderColor: faint,
        radius: 2
      });
    }
    return sets;
  };
  const drawRecall = () => {
    const rows = kv.visible.filter(
        (r) => kv.good(r) && kv.num(recall, r) !== null && kv.num(entries, r) !== null);
    const groups = kv.groupBy(rows, kv.groupKey);
    const families = [...kv
                          .groupBy(rows, (r) => JSON.stringify([
                            kv.groupKey(r), kv.text("name", r), kv.text("precision", r)
                          ]))
                          .values()];
    const reason = rows.length === 0          ? "no row has attention_recall"
        : families.every((f) => f.length < 2) ? "needs a policy at two budgets or more"
                                              : "";
    if (!kv.showCard("recall", "Recall against budget", reason)) return;
    const several = groups.size < 2
        ? ""
        : ` ${groups.size} traces, sequences or modes are drawn together: filter for one.`;
    kv.at("recall-caption").textContent =
        "Lines join the best of a policy at each size. The bound: every query head holds its own " +
        `best positions, as many as the policy holds.${several}`;
    const named = new Set();
    const datasets = [...boundSets(groups), ...families.flatMap((f) => familySets(f, named))];
    const label = (i) => `${kv.shorten(kv.labels[i.raw.row])}: ${kv.digits(i.raw.y)} at ${
        kv.digits(i.raw.x)} entries`;
    const options = {
      parsing: false,
      scales: {
        x: kv.axis("mean entries per head", {type: "linear"}),
        y: kv.axis("attention recall", {max: 1}),
      },
      onClick: (event, [hit]) => hit && kv.pick(datasets[hit.datasetIndex].data[hit.index].row),
      plugins: {
        legend: {labels: {filter: (item) => item.text !== ""}},
        tooltip: {callbacks: {label}},
      },
    };
    kv.draw(
        "recall", {type: "scatter", data: {datasets}, options},
        `Attention recall against mean entries of ${kv.plural(rows.length, "row")}.`);
  };

  // ---- times ----
  const kernels = ["append", "attend", "update_scores", "select", "age"];
  const mostBars = 24;
  const timeOf = (kernel, row) => kv.num(`time.${kernel}_us_p50`, row);
  const timesTooltip = (rows) => ({
    callbacks: {
      title: ([item]) => kv.shorten(kv.labels[rows[item.dataIndex]], 90),
      label: (item) => `${item.dataset.label}: ${kv.digits(item.raw)} \u00b5s`,
      footer: ([item]) => {
        const row = rows[item.dataIndex], speedup = kv.num("time.speedup", row);
        const against =
            speedup === null ? "" : `, ${kv.digits(speedup)} times the full cache's speed`;
        return `step ${kv.digits(timeOf("step", row))} \u00b5s${against}`;
      },
    },
  });
  const drawTimes = () => {
    const timed = kv.visible.filter(
        (r) => kv.text("mode", r) === "time" && kernels.some((k) => timeOf(k, r) !== null));
    const reason = timed.length > 0 ? "" : "no row of mode time (kvreplay time)";
    if (!kv.showCard("times", "Kernel times of a step", reason)) return;
    const rows = timed.slice(0, mostBars);
    kv.at("times").parentElement.style.height = `${90 + 26 * rows.length}px`;
    const names =
        rows.map((r) => `${kv.shorten(kv.labels[r], 30)} \u00d7 ${kv.num("time.batch", r) ?? 1}`);
    const more = timed.length === rows.length
        ? ""
        : ` The first ${rows.length} of ${timed.length}: filter for others.`;
    kv.at("times-caption").textContent =
        `Microseconds of the median step, summed over layers and batch (\u00d7 batch).${more}`;
    const datasets = kernels.map(
        (k, i) => ({label: k, backgroundColor: kv.colour(i), data: rows.map((r) => timeOf(k, r))}));
    const options = {
      indexAxis: "y",
      scales: {
        x: kv.axis("\u00b5s", {stacked: true, beginAtZero: true}),
        y: {...kv.axis("", {stacked: true}), title: {display: false}},
      },
      onClick: (event, [hit]) => hit && kv.pick(rows[hit.index]),
      plugins: {tooltip: timesTooltip(rows)},
    };
    const steps = rows.map((r, i) => `${names[i]} ${kv.digits(timeOf("step", r))} microseconds`);
    kv.draw(
        "times", {type: "bar", data: {labels: names, datasets}, options},
        `Kernel times: ${steps.join("; ")}.`);
  };

  kv.startSizes = () => {
    const all = () => {
      drawRecall();
      drawTimes();
    };
    kv.on("filter theme", all);
    all();
  };
})();
