"""What the client tests share: a list of checks, printed one line each, and the arguments of a script.

A script is `NAME.py BASE_URL [--model NAME]`, where BASE_URL has no /v1, against a server that answers from the script of
replies.py (run.py starts one). It exits 1 when a check failed; a check that raises is a failed check.
"""
import argparse
import asyncio
import inspect
import sys
import traceback

THINKING_OFF = {"thinking": {"type": "disabled"}}


class Checks:
    def __init__(self, base_url, model):
        self.base_url = base_url.rstrip("/")
        self.v1 = self.base_url + "/v1"
        self.model = model
        self.passed = self.failed = 0
        # One for all checks: some clients keep connections that belong to a loop.
        self.loop = asyncio.new_event_loop()

    def check(self, name, good, detail=""):
        good = bool(good)
        self.passed += good
        self.failed += not good
        detail = str(detail)
        if good:
            detail = detail[:150]
        print(f"{'ok  ' if good else 'FAIL'} {name}" + (f": {detail}" if detail else ""), flush=True)
        return good

    def equal(self, name, got, expected):
        return self.check(name, got == expected, repr(got) if got == expected else f"{got!r}, expected {expected!r}")

    def raises(self, name, kind, body, *expected):
        """`body` must raise `kind`; each of `expected` is a text that its message must hold."""
        try:
            result = body()
        except kind as error:
            missing = [text for text in expected if text not in str(error)]
            self.check(name, not missing, f"{error}" + (f", lacks {missing}" if missing else ""))
            return error
        except Exception as error:  # noqa: BLE001
            self.check(name, False, f"{type(error).__name__} instead of {kind.__name__}: {error}")
        else:
            self.check(name, False, f"accepted: {result!r}"[:300])
        return None

    def run(self, *bodies):
        for body in bodies:
            try:
                result = body(self)
                if inspect.isawaitable(result):
                    self.loop.run_until_complete(result)
            except Exception as error:  # noqa: BLE001
                where = traceback.extract_tb(error.__traceback__)
                mine = [f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno}" for f in where if "site-packages" not in f.filename]
                self.check(body.__name__, False, f"{type(error).__name__}: {error} (at {' '.join(mine[1:])})")


def main(*bodies):
    """Runs the functions, each with the checks as its argument, and ends the program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("base_url", help="for example http://127.0.0.1:8000")
    parser.add_argument("--model", default="deepseek-v4-flash")
    parser.add_argument("--only", help="run only the groups whose name holds this text")
    args = parser.parse_args()
    checks = Checks(args.base_url, args.model)
    checks.run(*(body for body in bodies if not args.only or args.only in body.__name__))
    print(f"{checks.passed} passed, {checks.failed} failed")
    sys.exit(1 if checks.failed else 0)
