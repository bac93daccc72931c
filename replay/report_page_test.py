"""The report as its readers meet it: opened in headless Chromium. Exit code 77: no Chromium here.

KVREPLAY_PROGRAM=build/release/replay/kvreplay KVREPLAY_SOURCE=. python3 replay/report_page_test.py
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from chromium import Browser, find_chromium  # noqa: E402

PROGRAM = os.environ.get("KVREPLAY_PROGRAM", "build/release/replay/kvreplay")
SOURCE = pathlib.Path(os.environ.get("KVREPLAY_SOURCE", "."))
PLOTS = ["scatter", "steps", "confidence", "histogram", "recall", "times"]
# The share of pixels of a canvas that are not as its corner.
DRAWN = """(c => { const d = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
  const key = i => d[i] + d[i + 1] * 256 + d[i + 2] * 65536 + (d[i + 3] > 40 ? 1 : 0) * 2 ** 24;
  let n = 0; for (let i = 0; i < d.length; i += 4) n += key(i) !== key(0);
  return 4 * n / d.length; })"""
HOSTILE = [
    "</script><script>window.hacked=1</script>",
    '<img src=x onerror="window.hacked=1">',
    "$' $& $1",
    '" onmouseover="window.hacked=1',
    "\U0001f600\u202eabc",
    "\\xf0\\x9f\\x98",
    "<!--<script>",
    "{{script}}",
    "javascript:window.hacked=1",
    'a,"b"\nc',
    "__proto__",
    "constructor",
    "&lt;b&gt;",
    "\u2028",
    "*" * 3000,
]


def kvreplay(*arguments):
    done = subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def row(policy, mean_bytes, error, **more):
    """A row as results.json has it."""
    out = {
        "trace": "t.h5",
        "trace_fingerprint": "00",
        "sequence": 0,
        "layers": "2/2",
        "policy": policy,
        "name": policy.split(":")[0],
        "params": dict(re.findall(r"(\w+)=(\w+)", policy)),
        "precision": "fp16",
        "mode": "open",
        "status": "ok",
        "tokens": {"prompt": 100, "decoded": 50, "scored": 50},
        "memory": {
            "mean_bytes": mean_bytes,
            "memory_ratio": mean_bytes / 1e6,
            "mean_entries": mean_bytes / 100,
        },
        "quality": {"output_rel_l2": error, "attention_recall": 1 - error},
    }
    return {**out, **more}


def write(path, rows):
    path.write_text(
        json.dumps(
            {"schema": "kvreplay.results/1", "tool": {"command": rows[0]["policy"]}, "runs": rows}
        )
    )
    return path


class Page(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory(prefix="kvreplay_page_")
        cls.here = pathlib.Path(cls.folder.name)
        cls.browser = Browser()
        samples = SOURCE / "traces/samples"
        policies = [
            "full",
            "window:budget=64",
            "window:budget=128",
            "h2o:budget=64",
            "h2o:budget=128",
            "confkv:tau=q0.5,high=88,low=265",
            "h2o:budget=96+int8:window=64",
        ]
        kvreplay(
            "replay",
            samples / "smollm2-1k.h5",
            *[x for p in policies for x in ("-p", p)],
            "-o",
            cls.here / "a.json",
        )
        kvreplay(
            "time",
            samples / "smollm2-64.h5",
            "-p",
            "full",
            "-p",
            "h2o:budget=16",
            "--repeat",
            1,
            "-o",
            cls.here / "t.json",
        )
        needles = [
            row(
                f"tova:budget={b}",
                1e5 * b,
                0.1,
                tokens={"prompt": n, "decoded": 9, "scored": 9},
                quality={"evidence_kept": d / 10},
                details={"needle": [n * d // 10, n * d // 10 + 5]},
            )
            for b in (1, 2)
            for n in (100, 200, 400)
            for d in range(0, 10, 3)
        ]
        write(cls.here / "n.json", needles)
        cls.page = cls.report("r.html", "a.json", "t.json", "n.json")

    @classmethod
    def tearDownClass(cls):
        cls.browser.close()
        cls.folder.cleanup()

    @classmethod
    def report(cls, name, *results):
        kvreplay("report", *[cls.here / r for r in results], "-o", cls.here / name)
        return cls.here / name

    def open(self, page):
        self.browser.resize(1280, 900)
        self.browser.media()
        self.browser.open(page)
        self.assertEqual(self.browser.js("document.documentElement.dataset.ready"), "yes")

    def tearDown(self):
        # Advice about reading canvases twice is about this test, which does.
        self.assertEqual([e for e in self.browser.errors if "willReadFrequently" not in e], [])
        self.assertEqual(self.browser.dialogs, [])
        self.assertEqual(
            [r for r in self.browser.requests if not r.startswith(("file:", "data:"))], []
        )

    def filter(self, text):
        self.browser.js("(i => { i.focus(); i.select(); })(document.getElementById('filter'))")
        self.browser.call("Input.insertText", text=text)
        if not text:
            self.browser.js(
                "(i => { i.value = ''; i.dispatchEvent(new Event('input')); })(document.getElementById('filter'))"
            )
        self.browser.js("new Promise(r => setTimeout(r, kv.count > 2000 ? 400 : 120))")
        self.browser.settle()

    def column(self, index):
        return self.browser.js(
            f"[...document.querySelectorAll('#table tbody tr')].map(r => r.cells[{index}].textContent)"
        )

    def click_text(self, selector):
        x, y = self.browser.js(
            f"""(e => {{ e.scrollIntoView({{block: 'center'}}); const r = e.getBoundingClientRect();
            return [r.x + r.width / 2, r.y + r.height / 2]; }})(document.querySelector({json.dumps(selector)}))"""
        )
        self.browser.mouse(x, y)

    def point(self, row):
        """Where the scatter has a row, in the window."""
        return self.browser.js(
            f"""(() => {{ const c = Chart.getChart('scatter'); c.canvas.scrollIntoView({{block: 'center'}});
            const b = c.canvas.getBoundingClientRect();
            for (const [i, s] of c.data.datasets.entries()) for (const [j, p] of s.data.entries())
              if (!s.front && p.row === {row}) {{ const e = c.getDatasetMeta(i).data[j]; return [b.x + e.x, b.y + e.y]; }} }})()"""
        )

    def check_drawn(self):
        for plot in PLOTS:
            self.assertGreater(
                self.browser.js(f"{DRAWN}(document.getElementById('{plot}'))"), 0.005, plot
            )
        heats = self.browser.js(f"[...document.querySelectorAll('.heat canvas')].map({DRAWN})")
        self.assertEqual(len(heats), 4)
        self.assertTrue(all(share > 0.3 for share in heats), heats)

    def test_every_chart_is_drawn_in_every_medium(self):
        for medium, scheme in (("", "light"), ("", "dark"), ("print", "dark")):
            with self.subTest(medium=medium, scheme=scheme):
                self.open(self.page)
                self.browser.media(medium, scheme)
                self.check_drawn()
                paper = self.browser.js("getComputedStyle(document.body).backgroundColor")
                dark = scheme == "dark" and medium != "print"
                self.assertEqual(paper == "rgb(20, 23, 28)", dark)
                # The axes' words are of the medium's colour too, not only the page around them.
                self.assertEqual(
                    self.browser.js("Chart.getChart('steps').options.scales.x.ticks.color"),
                    "#444444" if medium == "print" else "#a3abbb" if dark else "#586072",
                )
                hidden = self.browser.js(
                    "getComputedStyle(document.getElementById('theme')).display"
                )
                self.assertEqual(hidden == "none", medium == "print")
        self.assertGreater(len(self.browser.call("Page.printToPDF")["data"]), 50000)

    def test_a_print_finds_everything_drawn(self):
        """A browser lays the sheets out as soon as the event's listeners have returned."""
        self.open(self.page)
        self.browser.media("", "dark")
        shares, widths, rows, ink = self.browser.js(
            f"""(() => {{ dispatchEvent(new Event('beforeprint'));
            const all = [...document.querySelectorAll('canvas')];
            const out = [all.map({DRAWN}), all.map(c => c.getBoundingClientRect().width), document.querySelectorAll('#table tbody tr').length,
                         Chart.getChart('steps').options.scales.x.ticks.color];
            dispatchEvent(new Event('afterprint'));
            return out; }})()"""
        )
        self.assertEqual(len(shares), 10)
        self.assertTrue(all(s > 0.005 for s in shares), shares)
        self.assertTrue(all(0 < w <= 700 for w in widths), widths)
        self.assertEqual(rows, self.browser.js("kv.count"))
        self.assertEqual(ink, "#444444")
        self.browser.settle()
        self.assertEqual(self.browser.js("document.querySelectorAll('#table tbody tr').length"), 25)
        self.check_drawn()

    def test_theme_button(self):
        self.open(self.page)
        before = self.browser.js("getComputedStyle(document.body).backgroundColor")
        self.click_text("#theme")
        self.assertNotEqual(
            self.browser.js("getComputedStyle(document.body).backgroundColor"), before
        )
        self.click_text("#theme")
        self.assertEqual(self.browser.js("getComputedStyle(document.body).backgroundColor"), before)

    def test_narrow_screens_do_not_scroll_sideways(self):
        self.open(self.page)
        for width in (390, 320, 768):
            self.browser.resize(width, 844, phone=True)
            self.browser.open(self.page)
            self.check_drawn()
            self.assertLessEqual(self.browser.js("document.scrollingElement.scrollWidth"), width)

    def test_table_sorts(self):
        self.open(self.page)
        at = self.browser.js(
            "[...document.querySelectorAll('#table th')].findIndex(h => h.dataset.column === 'quality.attention_recall')"
        )
        header = "#table th[data-column='quality.attention_recall']"
        for order, reverse in (("ascending", False), ("descending", True)):
            self.click_text(header + " button")
            self.assertEqual(
                self.browser.js(f"document.querySelector(\"{header}\").getAttribute('aria-sort')"),
                order,
            )
            shown = self.column(at)
            numbers = [float(x) for x in shown if x]
            self.assertGreaterEqual(len(numbers), 7)
            self.assertEqual(numbers, sorted(numbers, reverse=reverse))
            self.assertEqual(
                shown[: len(numbers)], [x for x in shown if x]
            )  # rows without one come last

    def test_filter(self):
        self.open(self.page)
        for text, expected in (
            ("h2o", lambda n: "h2o" in n),
            ("h2o -int8", lambda n: n.startswith("h2o") and "int8" not in n),
            ("budget=128", lambda n: "128" in n),
        ):
            self.filter(text)
            names = [n.lstrip("\u25c6\u00a0") for n in self.column(1)]
            self.assertTrue(names and all(map(expected, names)), (text, names))
        self.filter("memory_ratio<0.1")
        at = self.browser.js(
            "[...document.querySelectorAll('#table th')].findIndex(h => h.dataset.column === 'memory.memory_ratio')"
        )
        self.assertTrue(self.column(at) and all(float(x) < 0.1 for x in self.column(at)))
        self.filter("no such row")
        self.assertEqual(self.column(0), [])
        self.assertTrue(self.browser.js("document.getElementById('recall-card').hidden"))
        self.filter("")
        self.check_drawn()

    def test_hover_names_and_click_chooses(self):
        self.open(self.page)
        wanted = self.browser.js("kv.labels.indexOf('window:budget=64')")
        x, y = self.point(wanted)
        self.browser.mouse(x, y, click=False)
        self.assertEqual(
            self.browser.js("Chart.getChart('scatter').tooltip.title"), ["window:budget=64"]
        )
        self.assertGreater(self.browser.js("Chart.getChart('scatter').tooltip.opacity"), 0)
        self.browser.mouse(x, y)
        self.assertEqual(
            self.browser.js("document.querySelector('#table tr[aria-selected=true]').dataset.row"),
            str(wanted),
        )
        self.assertTrue(
            self.browser.js(
                f"document.querySelector('#table tr[data-row=\"{wanted}\"] input').checked"
            )
        )
        self.assertIn(
            "window:budget=64",
            self.browser.js("document.querySelector('#chosen .spec').textContent"),
        )
        self.assertIn(
            "window:budget=64",
            self.browser.js("Chart.getChart('steps').data.datasets.map(d => d.label).join()"),
        )
        # A row of the table chooses as well; taking the tick away drops it.
        other = self.browser.js("kv.labels.indexOf('h2o:budget=128')")
        self.click_text(f"#table tr[data-row='{other}'] th")
        self.assertEqual(self.browser.js("kv.focus"), other)
        self.click_text(f"#table tr[data-row='{other}'] input")
        self.assertNotIn(other, self.browser.js("kv.chosen"))

    def test_keyboard(self):
        self.open(self.page)
        self.browser.js("document.getElementById('scatter').focus()")
        for key in ("ArrowRight", "ArrowRight", "Enter"):
            self.browser.key(key)
        second = self.browser.js(
            "kv.visible.filter(r => kv.good(r) && kv.num(kv.y, r) !== null).sort((a, b) => kv.num(kv.x, a) - kv.num(kv.x, b) || a - b)[1]"
        )
        self.assertEqual(self.browser.js("kv.focus"), second)
        self.browser.js("document.querySelector('#heads canvas').focus()")
        self.browser.key("ArrowRight")
        self.assertRegex(
            self.browser.js("document.querySelector('#heads .reading').textContent"),
            r"^layer 0, head 0: \d",
        )
        unnamed = self.browser.js(
            """[...document.querySelectorAll('button, input, select, canvas, summary')].filter(e => e.offsetParent &&
            !(e.getAttribute('aria-label') || e.textContent.trim() || e.labels?.length)).map(e => e.outerHTML)"""
        )
        self.assertEqual(unnamed, [])

    def test_hostile_names(self):
        rows = [
            row(
                text,
                1000.0 + i,
                0.1 + i / 100,
                trace=text,
                note=text,
                params={},
                precision=text,
                layers=text,
                name=text,
                quality={
                    "output_rel_l2": 0.1 + i / 100,
                    "attention_recall": 0.5,
                    "kept_share." + text: 0.5,
                },
            )
            for i, text in enumerate(HOSTILE)
        ]
        write(self.here / "hostile.json", rows)
        self.open(self.report("hostile.html", "hostile.json"))
        for text in ("", "script", "hacked=1", "constructor"):
            self.filter(text)
        self.filter("")
        for r in range(len(rows)):
            self.browser.js(f"kv.choose({r})")
        for index in range(self.browser.js("document.getElementById('scatter-y').options.length")):
            self.browser.js(
                f"(s => {{ s.selectedIndex = {index}; s.dispatchEvent(new Event('change')); }})(document.getElementById('scatter-y'))"
            )
        self.browser.js(
            "(s => { s.selectedIndex = 0; s.dispatchEvent(new Event('change')); })(document.getElementById('scatter-y'))"
        )
        x, y = self.point(0)
        self.browser.mouse(x, y)
        self.browser.settle()
        self.assertEqual(self.browser.js("typeof window.hacked"), "undefined")
        self.assertEqual(self.browser.js("document.scripts.length"), 3)
        self.assertEqual(self.browser.js("document.querySelectorAll('img').length"), 0)
        self.assertLessEqual(self.browser.js("document.scrollingElement.scrollWidth"), 1280)
        names = [n.lstrip("\u25c6\u00a0") for n in self.column(1)]
        self.assertEqual(len(names), len(rows))
        for text in (
            "</script><script>window.hacked=1</script>",
            "$' $& $1",
            "__proto__",
            "&lt;b&gt;",
            "{{script}}",
        ):
            self.assertIn(text, names)
        # Even a name that had become a script would not run: it lacks the page's nonce.
        self.browser.js(
            "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.hacked=2'}))"
        )
        self.assertEqual(self.browser.js("typeof window.hacked"), "undefined")
        self.assertTrue(
            self.browser.errors and all("Content Security Policy" in e for e in self.browser.errors)
        )
        self.browser.errors.clear()

    def test_ten_thousand_rows(self):
        rows = [row(f"h2o:budget={i}", 1000.0 + i, 1 / (1 + i % 997)) for i in range(1, 10001)]
        write(self.here / "many.json", rows)
        self.open(self.report("many.html", "many.json"))
        self.assertEqual(len(self.column(0)), 25)
        self.click_text("#table th[data-column='quality.output_rel_l2'] button")
        self.assertEqual(self.column(1)[0].lstrip("\u25c6\u00a0"), "h2o:budget=996")
        self.filter("budget=1234")
        self.assertEqual([n.lstrip("\u25c6\u00a0") for n in self.column(1)], ["h2o:budget=1234"])
        self.filter("budget>=9990")
        self.assertEqual(len(self.column(1)), 11)
        self.filter("")
        self.browser.js("document.getElementById('last-page').click()")
        self.assertIn(
            "9976 to 10000 of 10000",
            self.browser.js("document.getElementById('page-text').textContent"),
        )

    def test_means_come_first_and_their_sequences_are_drawn(self):
        saw = {"series": {"bytes": {"step": [100, 120, 121, 149], "value": [1, 9, 1, 9]}}}
        rows = [
            row(
                f"h2o:budget={b}",
                1000.0 * b,
                0.1 * b + s / 50,
                sequence=s,
                **({"details": saw} if s >= 0 else {}),
            )
            for b in (1, 2)
            for s in (0, 1, -1)
        ]
        write(self.here / "means.json", rows + [row("full", 5000.0, 0.0, trace="other.h5")])
        self.open(self.report("means.html", "means.json"))
        self.assertEqual(
            [n.lstrip("\u25c6\u00a0") for n in self.column(1)],
            ["h2o:budget=1", "h2o:budget=2", "full"],
        )
        self.browser.js("kv.choose(kv.allRows.find(kv.isMean))")
        self.browser.settle()
        self.assertIn(
            "h2o:budget=1 (sequence 0, open)",
            self.browser.js("Chart.getChart('steps').data.datasets.map(d => d.label)"),
        )
        self.filter("")
        self.assertEqual(len(self.column(1)), 7)

    def test_what_cannot_be_drawn_is_named(self):
        write(
            self.here / "bare.json",
            [
                row("full", 1000.0, 0.0),
                row("h2o:budget=8", 1.0, 0.5, status="failed", note="a reason"),
            ],
        )
        self.open(self.report("bare.html", "bare.json"))
        reasons = self.browser.js("document.getElementById('left-out').innerText")
        for title in (
            "Memory over the steps",
            "Confidence",
            "Layer by head",
            "Recall against budget",
            "Kernel times",
            "Needle grid",
        ):
            self.assertIn(title, reasons)
        shown = self.browser.js(
            "[...document.querySelectorAll('canvas')].filter(c => c.offsetParent).map(c => c.id)"
        )
        self.assertEqual(shown, ["scatter"])
        self.assertIn("a reason", self.browser.js("document.getElementById('notes').innerText"))
        self.assertIn(
            "1 row failed", self.browser.js("document.getElementById('summary').innerText")
        )
        empty = self.here / "empty.json"
        empty.write_text('{"schema": "kvreplay.results/1", "runs": []}')
        self.open(self.report("empty.html", "empty.json"))


if __name__ == "__main__":
    if os.environ.get("KVREPLAY_SKIP_CHROMIUM") == "1" or find_chromium() is None:
        print("SKIPPED: no Chromium (package chromium), or KVREPLAY_SKIP_CHROMIUM=1")
        sys.exit(77)
    without = subprocess.run(
        [PROGRAM, "report", "absent.json", "-o", "absent.html"], capture_output=True, text=True
    )
    if "libjs-chart.js" in without.stderr:
        print("SKIPPED: " + without.stderr.strip())
        sys.exit(77)
    unittest.main(verbosity=2)
