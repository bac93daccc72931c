// The table: sorted, filtered, in pages; and the line of chosen rows above it.
"use strict";
(() => {
  const fixed = [
    {id: "policy", title: "policy", text: (r) => kv.labels[r], head: true},
    {id: "trace", title: "trace", text: kv.traceName, vary: true},
    {id: "mode", title: "mode", text: (r) => kv.text("mode", r), vary: true},
    {id: "layers", title: "layers", text: (r) => kv.text("layers", r), vary: true},
    {id: "precision", title: "precision", text: (r) => kv.text("precision", r)},
    {id: "note", title: "note", text: (r) => kv.text("note", r), off: true},
  ];
  const usual = [
    "memory.mean_entries", "memory.mean_bytes", "memory.memory_ratio", "quality.attention_recall",
    "quality.recall_bound", "quality.output_rel_l2", "quality.residual_rel_l2", "quality.kl_proxy",
    "quality.ppl", "quality.logit_kl", "quality.top1_agreement", "time.batch", "time.step_us_p50",
    "time.speedup"
  ];
  const numeric = kv.columns.map(
      (id) => ({
        id,
        title: kv.shortName(id),
        number: (r) => kv.num(id, r),
        off: id === "sequence" ? kv.distinct((r) => kv.num(id, r), kv.allRows).length < 2
                               : !usual.includes(id),
      }));
  const columns = [
    ...fixed.filter((c) => !c.vary || kv.distinct(c.text, kv.allRows).length > 1),
    ...numeric.filter((c) => c.id === "sequence"), ...numeric.filter((c) => c.id !== "sequence")
  ];
  columns.forEach((c) => {
    c.shown = !c.off;
  });

  let order = null, descending = false, sorted = kv.visible, page = 0;
  const pageSize = () => (kv.printing() ? 400 : Number(kv.at("page-size").value));
  const pages = () => Math.max(1, Math.ceil(sorted.length / pageSize()));

  const sort = () => {
    if (!order) {
      sorted = kv.visible;
      return;
    }
    const key = order.number || order.text, sign = descending ? -1 : 1;
    const keys = new Map(kv.visible.map((r) => [r, key(r)]));
    // Rows without a value come last either way; equal ones keep the file's order.
    sorted = [...kv.visible].sort((a, b) => {
      const x = keys.get(a), y = keys.get(b);
      if (x === null || y === null) return (x === null) - (y === null) || a - b;
      return (x < y ? -sign : x > y ? sign : 0) || a - b;
    });
  };
  const sortBy = (column) => {
    if (order === column)
      descending = !descending;
    else {
      order = column;
      descending = false;
    }
    sort();
    page = 0;
    drawHead();
    drawBody();
    kv.at("table").querySelector(`[data-column="${CSS.escape(column.id)}"] button`).focus();
  };

  const drawHead = () => {
    const cells = columns.filter((c) => c.shown)
                      .map(
                          (c) => kv.make(
                              "th", {
                                scope: "col",
                                class: c.number ? null : "text",
                                "data-column": c.id,
                                "aria-sort": c !== order ? "none"
                                    : descending         ? "descending"
                                                         : "ascending",
                                title: c.number ? c.id : null,
                              },
                              kv.make(
                                  "button", {type: "button", on: {click: () => sortBy(c)}},
                                  ...breakable(c.title, /(?<=_)/))));
    kv.at("table").tHead.replaceChildren(kv.make(
        "tr", {},
        kv.make("th", {scope: "col", class: "pick", "aria-label": "chosen for the charts"}),
        ...cells));
  };

  // A long SPEC may break after its commas and pluses, a column's name after its underscores.
  const breakable = (text, after = /(?<=[,+/])/) =>
      text.split(after).flatMap((part, i) => (i ? [document.createElement("wbr"), part] : [part]));
  const cell = (column, row) => {
    if (column.head)
      return kv.make(
          "th", {scope: "row", class: "text", title: kv.text("policy", row)},
          ...breakable(column.text(row)));
    if (column.text)
      return kv.make(
          "td", {class: column.text(row).length > 30 ? "text" : "text short"},
          ...breakable(column.text(row)));
    const value = column.number(row), ends = kv.interval(column.title, row);
    return kv.make(
        "td", {
          title: ends ? `95 %: ${kv.digits(ends[0])} to ${kv.digits(ends[1])}` : null,
        },
        kv.show(column.id, value));
  };
  const line = (row) => {
    const box = kv.make("input", {
      type: "checkbox",
      "aria-label": `choose ${kv.labels[row]}`,
      on: {change: (e) => (e.target.checked ? kv.choose(row) : kv.drop(row))},
    });
    box.checked = kv.chosen.includes(row);
    const classes =
        [kv.frontRows.has(row) ? "front" : "", kv.good(row) ? "" : "failed"].filter(Boolean);
    return kv.make(
        "tr", {
          "data-row": row,
          class: classes.join(" ") || null,
          "aria-selected": String(kv.focus === row),
          on: {
            click: (e) => {
              if (e.target !== box) kv.choose(row);
            }
          },
        },
        kv.make("td", {class: "pick"}, box),
        ...columns.filter((c) => c.shown).map((c) => cell(c, row)));
  };
  const drawBody = () => {
    page = Math.min(page, pages() - 1);
    const first = page * pageSize(), rows = sorted.slice(first, first + pageSize());
    const body = kv.at("table").tBodies[0], active = document.activeElement;
    const held = body.contains(active) ? active.closest("tr").dataset.row : null;
    body.replaceChildren(...rows.map(line));
    if (held !== null) body.querySelector(`tr[data-row="${held}"] input`)?.focus();
    kv.at("page-text").textContent = sorted.length
        ? `${first + 1} to ${first + rows.length} of ${sorted.length}`
        : "no row passes the filter";
    kv.at("first-page").disabled = kv.at("previous-page").disabled = page === 0;
    kv.at("next-page").disabled = kv.at("last-page").disabled = page + 1 >= pages();
  };

  // The page of the table that holds a row, and the row in sight.
  kv.reveal = (row) => {
    const place = sorted.indexOf(row);
    if (place < 0) return;
    page = Math.floor(place / pageSize());
    drawBody();
    const scroller = kv.at("table").parentElement;
    const shown = kv.at("table").querySelector(`tr[data-row="${row}"]`);
    if (shown) scroller.scrollTop = shown.offsetTop;
  };

  const chips =
      () =>
          kv.chosen.map(
              (row) =>
                  kv.make(
                      "li", {class: row === kv.focus ? "focus" : null}, swatch(row),
                      kv.make(
                          "button", {
                            type: "button",
                            "aria-pressed": String(row === kv.focus),
                            on: {click: () => kv.choose(row)}
                          },
                          ...breakable(kv.labels[row])),
                      kv.make(
                          "button", {
                            type: "button",
                            "aria-label": `take ${kv.labels[row]} out`,
                            on: {click: () => kv.drop(row)}
                          },
                          "\u00d7")));
  const swatch = (row) => {
    const box = kv.make("span", {class: "swatch", "aria-hidden": "true"});
    box.style.background = kv.chosenColour(row);
    return box;
  };
  const copy = async (text, button) => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      const range = document.createRange();
      range.selectNodeContents(button.previousElementSibling);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      button.textContent = "Selected";
    }
  };
  const facts = (row) =>
      columns
          .filter((c) => c.number && c.number(row) !== null && (c.shown || /^quality\./.test(c.id)))
          .map((c) => {
            const ends = kv.interval(c.title, row);
            const range = ends ? ` (${kv.digits(ends[0])} to ${kv.digits(ends[1])})` : "";
            return kv.make(
                "div", {}, kv.make("dt", {}, c.title),
                kv.make("dd", {}, kv.show(c.id, c.number(row)) + range));
          });
  const drawChosen = () => {
    const row = kv.focus;
    if (row === null) {
      kv.at("chosen").replaceChildren(kv.make(
          "p", {class: "caption"},
          "Click a point or a row to choose it; the charts below show the chosen rows."));
      return;
    }
    const button = kv.make("button", {type: "button", class: "tool"}, "Copy");
    button.addEventListener("click", () => copy(kv.text("policy", row), button));
    kv.at("chosen").replaceChildren(
        kv.make("ul", {class: "chips", "aria-label": "Chosen rows"}, ...chips()),
        kv.make(
            "div", {class: "spec-line"},
            kv.make("span", {class: "spec"}, ...breakable(kv.text("policy", row))), button),
        kv.make("dl", {class: "facts"}, ...facts(row)),
        kv.text("note", row) ? kv.make("p", {class: "caption"}, kv.text("note", row)) : "");
  };

  const drawChooser = () => {
    kv.at("columns").replaceChildren(...columns.filter((c) => !c.head).map((c) => {
      const box = kv.make("input", {
        type: "checkbox",
        on: {
          change: (e) => {
            c.shown = e.target.checked;
            drawHead();
            drawBody();
          }
        }
      });
      box.checked = c.shown;
      return kv.make("label", {}, box, ` ${c.title}`);
    }));
  };
  const turn = (to) => {
    page = Math.max(0, Math.min(to, pages() - 1));
    drawBody();
  };

  kv.startTable = () => {
    kv.at("first-page").addEventListener("click", () => turn(0));
    kv.at("previous-page").addEventListener("click", () => turn(page - 1));
    kv.at("next-page").addEventListener("click", () => turn(page + 1));
    kv.at("last-page").addEventListener("click", () => turn(pages() - 1));
    kv.at("page-size").addEventListener("change", () => turn(0));
    kv.on("filter", () => {
      sort();
      page = 0;
      drawBody();
    });
    kv.on("axes", drawBody);
    kv.on("theme", () => {
      drawBody();
      drawChosen();
    });
    kv.on("choice", () => {
      drawBody();
      drawChosen();
    });
    sort();
    drawHead();
    drawBody();
    drawChosen();
    drawChooser();
  };
})();
