"""Headless Chromium through its DevTools pipe, with Python's own library: for report_page_test.py
and for pictures of a page:

    python3 replay/chromium.py report.html picture.png [--width 1280] [--dark] [--print] [--part ID]
"""

import argparse
import base64
import fcntl
import json
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile


def find_chromium():
    names = [os.environ.get("KVREPLAY_CHROMIUM"), "chromium", "chromium-browser", "google-chrome"]
    return next((shutil.which(name) for name in names if name and shutil.which(name)), None)


class Browser:
    """One browser with one page. `errors` collects what a console would show as errors."""

    def __init__(self, width=1280, height=900):
        self.profile = tempfile.TemporaryDirectory(
            prefix="kvreplay_chromium_", ignore_cleanup_errors=True
        )
        to_browser, self.out = os.pipe()
        self.inp, from_browser = os.pipe()
        # High numbers first, so that moving one to 3 or 4 cannot overwrite the other.
        ends = [fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in (to_browser, from_browser)]

        def place():
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        command = [
            find_chromium(),
            "--headless=new",
            "--remote-debugging-pipe",
            "--disable-gpu",
            "--hide-scrollbars",
            "--no-first-run",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--disable-component-update",
            f"--user-data-dir={self.profile.name}",
        ]
        if os.geteuid() == 0:
            command.append("--no-sandbox")
        self.process = subprocess.Popen(
            command + ["about:blank"],
            preexec_fn=place,
            pass_fds=(3, 4),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for fd in (to_browser, from_browser, *ends):
            os.close(fd)
        self.buffer, self.next_id, self.session = b"", 0, None
        self.errors, self.requests, self.dialogs, self.loaded = [], [], [], False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)

    def close(self):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self.out)
        os.close(self.inp)
        self.profile.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.close()

    def read(self):
        while b"\0" not in self.buffer:
            data = os.read(self.inp, 1 << 20)
            if not data:
                raise RuntimeError("Chromium ended")
            self.buffer += data
        message, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(message)

    def note(self, event):
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in (
            "error",
            "warning",
            "assert",
        ):
            self.errors.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Page.javascriptDialogOpening":
            self.dialogs.append(params["message"])
        elif method == "Page.loadEventFired":
            self.loaded = True

    def call(self, method, **params):
        self.next_id += 1
        message = {"id": self.next_id, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.read()
            if answer.get("id") == self.next_id:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.note(answer)

    def open(self, path):
        self.errors, self.requests, self.dialogs, self.loaded = [], [], [], False
        self.call("Page.navigate", url=pathlib.Path(path).resolve().as_uri())
        while not self.loaded:
            self.note(self.read())
        self.settle()

    def js(self, expression):
        result = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def settle(self):
        """Until what was asked for is laid out and painted."""
        self.js("new Promise(r => requestAnimationFrame(() => requestAnimationFrame(() => r())))")

    def resize(self, width, height, phone=False):
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )

    def media(self, medium="", scheme="light"):
        self.call(
            "Emulation.setEmulatedMedia",
            media=medium,
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        self.settle()

    def mouse(self, x, y, click=True):
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for kind in ("mousePressed", "mouseReleased") if click else ():
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self.settle()

    def key(self, name):
        code = {"ArrowRight": 39, "ArrowLeft": 37, "ArrowDown": 40, "Enter": 13, "Tab": 9}[name]
        for kind in ("rawKeyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code
            )
        self.settle()

    def picture(self, path, part=None):
        box = self.js(
            """(id => { const e = id ? document.getElementById(id) : document.documentElement;
            const r = e.getBoundingClientRect();
            return {x: r.x + scrollX, y: r.y + scrollY, width: r.width, height: r.height, scale: 1}; })"""
            f"({json.dumps(part)})"
        )
        shot = self.call(
            "Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=box
        )
        pathlib.Path(path).write_bytes(base64.b64decode(shot["data"]))


def main():
    parser = argparse.ArgumentParser(description="A picture of an HTML page.")
    parser.add_argument("page")
    parser.add_argument("picture")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=900)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--print", action="store_true")
    parser.add_argument("--part", help="id of the element; all of the page by default")
    parser.add_argument("--script", help="run before the picture is taken")
    options = parser.parse_args()
    with Browser(options.width, options.height) as browser:
        browser.media("print" if options.print else "", "dark" if options.dark else "light")
        browser.open(options.page)
        if options.script:
            browser.js(options.script)
            browser.settle()
        browser.picture(options.picture, options.part)
        for error in browser.errors:
            print(error)


if __name__ == "__main__":
    main()
