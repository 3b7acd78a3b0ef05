"""The two programs of a test that calls functions of an answer: `box_calls.py answer` and `box_calls.py tests`, each in
a box of its own, at the two ends of a socket (descriptor 0).

Started by `boxes` alone, under that name. Stands alone: the standard library, nothing of busrl. The first loads
answer.py and serves calls; the second runs the tests of tests.json and prints a line of JSON for each (`{"tests": n}`
first, `{"passed": bool, "why": text}` after each, or `{"unfit": text}` where the tests themselves are wrong).

- No object of the answer reaches the tests: values are copied as plain data (JSON, read back as Python's own types), so
  `==` is that of the tests. An object that is no plain data stays on the answer's side, and the tests hold a `Remote`:
  it can be called and iterated and has attributes and items, is equal to itself alone, and is neither true nor false.
- A name that the tests do not define is looked up among Python's own, then the modules of the standard library, then
  the answer's.
- After a broken frame, or the end of the other side, no test passes: `except Exception` does not catch `AnswerGone`.
- A list, dict or set that a call changes in place is changed for the tests only if the call returns None.
"""

from __future__ import annotations

import builtins
import json
import os
import struct
import sys

TYPE_CHECKING = False  # that of `typing`, whose import takes as long as the rest
if TYPE_CHECKING:
    import ast
    from typing import Any

MOST_BYTES = 8 << 20  # of a frame
SHOWN = 300
PLAIN, CHANGED = (type(None), bool, str, float), (list, dict, set, bytearray)
BUILDERS = {"t": tuple, "s": set, "z": frozenset}


class AnswerGone(BaseException):
    """The other end sent no valid frame, or has ended."""


class AnswerError(Exception):
    """The answer raised an exception that is not one of Python's own."""


class NotCarried(TypeError):
    """A value of the tests that cannot be given to the answer."""


class Link:
    """Frames of JSON both ways over one socket, and the objects of this side that the other side names by number."""

    def __init__(self, fd: int) -> None:
        self.fd, self.broken = fd, False
        self.objects: list[Any] = []
        self.numbers: dict[int, int] = {}

    def number(self, value: Any) -> int:
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        return self.numbers[id(value)]

    def send(self, message: Any) -> None:
        data = json.dumps(message).encode()
        data = struct.pack("<I", len(data)) + data
        try:
            while data:
                data = data[os.write(self.fd, data) :]
        except OSError:
            self.gone("the other end is closed")

    def receive(self) -> Any:
        (size,) = struct.unpack("<I", self._exactly(4))
        if size > MOST_BYTES:
            self.gone(f"a value of {size} bytes")
        try:
            return json.loads(self._exactly(size))
        except (ValueError, RecursionError, MemoryError):
            self.gone("a frame that is no JSON")

    def gone(self, why: str) -> Any:
        self.broken = True
        raise AnswerGone(why)

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = os.read(self.fd, size - len(data))
            if not more:
                self.gone("the answer's process has ended")
            data += more
        return data


def pack(value: Any, other: Any) -> Any:
    """Plain data as JSON; a subclass of a plain type as that type. `other` packs any other object."""
    if isinstance(value, PLAIN) and type(value) in PLAIN:
        return value
    if isinstance(value, int):
        return int(value) if abs(value) < 1 << 53 else {"i": hex(value)}
    if isinstance(value, (str, float)):
        return str.__str__(value) if isinstance(value, str) else float(value)
    if isinstance(value, list):
        return [pack(item, other) for item in value]
    if isinstance(value, dict):
        return {"d": [[pack(name, other), pack(item, other)] for name, item in value.items()]}
    for letter, kind in BUILDERS.items():
        if isinstance(value, kind):
            return {letter: [pack(item, other) for item in value]}
    if isinstance(value, (bytes, bytearray)):
        return {"b" if isinstance(value, bytes) else "y": value.hex()}
    if isinstance(value, complex):
        return {"c": [value.real, value.imag]}
    if isinstance(value, range):
        return {"r": [value.start, value.stop, value.step]}
    if (type(value).__module__, type(value).__name__) in (("decimal", "Decimal"), ("fractions", "Fraction")):
        return {"n": [type(value).__name__, str(value)]}
    return other(value)


def unpack(data: Any, other: Any) -> Any:
    """The value that `pack` packed, of Python's own types; `other` makes any other object from its letter and number.
    """
    if isinstance(data, list):
        return [unpack(item, other) for item in data]
    if not isinstance(data, dict):
        return data
    ((letter, value),) = data.items()
    if letter == "d":
        return {unpack(name, other): unpack(item, other) for name, item in value}
    if letter in BUILDERS:
        return BUILDERS[letter](unpack(item, other) for item in value)
    if letter == "i":
        return int(value, 16)
    if letter in ("b", "y"):
        return (bytes if letter == "b" else bytearray).fromhex(value)
    if letter == "c":
        return complex(*value)
    if letter == "r":
        return range(*value)
    if letter == "n":
        kinds = {"Decimal": "decimal", "Fraction": "fractions"}
        return getattr(__import__(kinds[value[0]]), value[0])(value[1])
    return other(letter, value)


# -- the answer's side ------------------------------------


OPERATIONS: dict[str, Any] = {
    "name": lambda space, name: space[name], "call": lambda on, *args, **keywords: on(*args, **keywords),
    "attribute": getattr, "set": setattr, "item": lambda on, key: on[key],
    "set_item": lambda on, key, value: on.__setitem__(key, value), "size": len, "iterate": iter, "next": next,
    "text": str, "shown": repr,
}  # fmt: skip


class Server:
    """The answer's side: performs the operations that the tests request."""

    def __init__(self, link: Link, space: dict[str, Any]) -> None:
        self.link, self.space = link, space

    def serve(self, problem: str) -> None:
        """Serve requests until the tests end. `problem`: the reason why the answer could not be loaded, which is then
        the reply to every request."""
        while True:
            self.answer(self.link.receive(), problem)

    def answer(self, request: Any, problem: str = "") -> None:
        try:
            if problem:
                raise RuntimeError(problem)
            reply = self.act(request)
            json.dumps(reply)
        except AnswerGone:
            raise
        except BaseException as raised:
            reply = {"raised": type(raised).__name__, "text": str(raised)[:SHOWN]}
        self.link.send(reply)

    def act(self, request: Any) -> Any:
        on = self.space if request["on"] is None else self.link.objects[request["on"]]
        args = unpack(request["args"], self.value)
        keywords = {name: unpack(value, self.value) for name, value in request["named"].items()}
        value = OPERATIONS[request["do"]](on, *args, **keywords)
        reply = {"value": pack(value, self.other)}
        if value is None:
            after = [pack(argument, self.other) for argument in args]
            reply["args"] = {str(at): data for at, data in enumerate(after) if data != request["args"][at]}
        return reply

    def other(self, value: Any) -> Any:
        return {"back": value.number} if type(value) is Callback else {"object": self.link.number(value)}

    def value(self, letter: str, number: int) -> Any:
        return self.link.objects[number] if letter == "back" else Callback(self, number)


class Callback:
    """A function of the tests, for the answer to call."""

    def __init__(self, server: Server, number: int) -> None:
        self.server, self.number = server, number

    def __call__(self, *args: Any) -> Any:
        server = self.server
        server.link.send({"callback": self.number, "args": pack(list(args), server.other)})
        while "do" in (reply := server.link.receive()):
            server.answer(reply)
        if "raised" in reply:
            raise exception_of(reply)
        return unpack(reply["value"], server.value)


def exception_of(reply: Any) -> Exception:
    kind = getattr(builtins, str(reply["raised"]), None)
    text = str(reply.get("text", ""))
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError):
        return kind(text)
    return AnswerError(f"{reply['raised']}: {text}")


def serve_answer() -> None:
    fd = os.dup(0)
    quiet = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(quiet, number)
    space, problem = {"__name__": "answer"}, ""
    try:
        with open("answer.py", encoding="utf-8", errors="replace") as file:
            exec(compile(file.read(), "answer.py", "exec"), space)
    except BaseException as raised:
        problem = f"the answer cannot be loaded: {type(raised).__name__}: {raised}"[:SHOWN]
    Server(Link(fd), space).serve(problem)


# -- the tests' side --------------------------------------


class Remote:
    """An object of the answer that is no plain data."""

    __slots__ = ("_ask", "_number")
    __hash__ = object.__hash__

    def __init__(self, ask: Any, number: int) -> None:
        object.__setattr__(self, "_ask", ask)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self._ask("call", self._number, args, keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask("attribute", self._number, (name,))

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("set", self._number, (name, value))

    def __getitem__(self, key: Any) -> Any:
        return self._ask("item", self._number, (key,))

    def __setitem__(self, key: Any, value: Any) -> None:
        self._ask("set_item", self._number, (key, value))

    def __len__(self) -> Any:
        return self._ask("size", self._number)

    def __iter__(self) -> Any:
        return self._ask("iterate", self._number)

    def __next__(self) -> Any:
        return self._ask("next", self._number)

    def __str__(self) -> str:
        return str(self._ask("text", self._number))

    def __repr__(self) -> str:
        return str(self._ask("shown", self._number))

    def __bool__(self) -> bool:
        raise TypeError("an object of the answer is neither true nor false")


class Space(dict):  # type: ignore[type-arg]
    """The global names of the tests."""

    def __init__(self, tests: Tests) -> None:
        super().__init__(__name__="tests")
        self.tests = tests

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        if name in sys.stdlib_module_names:
            return __import__(name)
        return self.tests.ask("name", None, (name,))


class Tests:
    def __init__(self, link: Link, out: int, stop: bool) -> None:
        self.link, self.out, self.stop = link, out, stop
        self.remotes: dict[int, Remote] = {}

    def ask(self, do: str, on: int | None, args: Any = (), keywords: Any = None) -> Any:
        """Let the answer's side perform an operation, and serve its calls of functions until the value is there."""
        packed = [pack(argument, self.other) for argument in args]
        by_name = {name: pack(argument, self.other) for name, argument in (keywords or {}).items()}
        self.link.send({"do": do, "on": on, "args": packed, "named": by_name})
        while "callback" in (reply := self.frame()):
            self.called(reply)
        if "raised" in reply:
            raised = exception_of(reply)
            raised.answers = True  # type: ignore[attr-defined]
            raise raised
        value = self.unpacked(reply["value"])
        if value is None:
            for place, changed in reply.get("args", {}).items():
                replace(args[int(place)], self.unpacked(changed))
        return value

    def frame(self) -> Any:
        reply = self.link.receive()
        whole = isinstance(reply, dict) and {"value", "raised", "callback"} & set(reply)
        return reply if whole and isinstance(reply.get("args", {}), (dict, list)) else self.link.gone("a wrong frame")

    def called(self, request: Any) -> None:
        """Serve a call of the answer: of a function that was an argument of the tests."""
        function, args = self.value("back", request["callback"]), self.unpacked(request.get("args"))
        try:
            reply = {"value": pack(function(*args), self.other)}
        except Exception as problem:
            reply = {"raised": type(problem).__name__, "text": str(problem)[:SHOWN]}
        self.link.send(reply)

    def unpacked(self, data: Any) -> Any:
        try:
            return unpack(data, self.value)
        except Exception as problem:
            return self.link.gone(f"no value: {problem}")

    def other(self, value: Any) -> Any:
        if type(value) is Remote:
            return {"back": value._number}
        if not callable(value):
            raise NotCarried(f"a {type(value).__name__} cannot be given to the answer")
        return {"object": self.link.number(value)}

    def value(self, letter: str, number: Any) -> Any:
        if type(number) is not int or number < 0:
            self.link.gone("a wrong number")
        if letter == "back":
            return self.link.objects[number] if number < len(self.link.objects) else self.link.gone("a wrong number")
        return self.remotes.setdefault(number, Remote(self.ask, number))

    def say(self, **what: Any) -> None:
        os.write(self.out, json.dumps(what).encode() + b"\n")

    def run(self, tree: ast.Module, name: str) -> None:
        """Run the tests of a source: its statements with an assert, its functions test...(), and check(candidate)."""
        space, tests = Space(self), units(tree, name)
        self.say(tests=sum(asserts for _, asserts in tests))
        for code, asserts in tests:
            why = self.attempt(lambda code=code: exec(code, space))
            if asserts:
                self.say(passed=not why, why=why)
            if why and (self.stop or not asserts or self.link.broken):
                return

    def pairs(self, name: str, inputs: list[Any], outputs: list[Any]) -> None:
        """Run the tests of one function: calls with their right results."""
        self.say(tests=len(inputs))
        for arguments, wanted in zip(inputs, outputs):
            why = self.attempt(lambda arguments=arguments, wanted=wanted: self.pair(name, arguments, wanted))
            self.say(passed=not why, why=why)
            if why and (self.stop or self.link.broken):
                return

    def pair(self, name: str, arguments: Any, wanted: Any) -> None:
        try:
            function = self.ask("name", None, (name,))
        except KeyError:
            function = getattr(self.ask("name", None, ("Solution",))(), name)
        result = as_lists(function(*arguments))
        assert result in (wanted, [wanted]) or [result] == wanted, f"{result!r:.{SHOWN}} for {wanted!r:.{SHOWN}}"

    def attempt(self, act: Any) -> str:
        """Perform one test; returns the reason why it did not pass, empty where it did."""
        try:
            act()
            return "the answer's process is gone" if self.link.broken else ""
        except AnswerGone as problem:
            return str(problem) or "gone"
        except (ImportError, NotCarried) as problem:
            if not hasattr(problem, "answers"):
                self.say(unfit=f"{type(problem).__name__}: {problem}"[:SHOWN])
                os._exit(0)
            return f"{type(problem).__name__}: {problem}"[:SHOWN]
        except BaseException as problem:
            return f"{type(problem).__name__}: {problem}"[:SHOWN]


def units(tree: ast.Module, name: str) -> list[tuple[Any, bool]]:
    """The code of each statement, and whether it is a test; the call of a test function follows its definition."""
    import ast

    codes: list[tuple[Any, bool]] = []
    for node in tree.body:
        defines = isinstance(node, (ast.FunctionDef, ast.ClassDef))
        tests = not defines and any(isinstance(part, ast.Assert) for part in ast.walk(node))
        codes.append((compile(ast.Module([node], []), "tests", "exec"), tests))
        if isinstance(node, ast.FunctionDef) and (node.name == "check" or node.name.startswith("test")):
            called = f"{node.name}({name if node.args.args else ''})"
            codes.append((compile(called, "tests", "exec"), True))
    return codes


def replace(old: Any, new: Any) -> None:
    """Give a list, dict, set or bytearray of the tests the contents that a call left in it."""
    if type(old) not in CHANGED or type(new) is not type(old):
        return
    if isinstance(old, (list, bytearray)):
        old[:] = new
    else:
        old.clear()
        old.update(new)


def as_lists(value: Any) -> Any:
    """Tuples as lists, as JSON has them."""
    if isinstance(value, (list, tuple)):
        return [as_lists(item) for item in value]
    return {name: as_lists(item) for name, item in value.items()} if isinstance(value, dict) else value


def run_tests() -> None:
    import ast

    out = os.dup(1)
    os.dup2(2, 1)
    with open("tests.json", encoding="utf-8") as file:
        tests = json.load(file)
    runner = Tests(Link(os.dup(0)), out, tests["stop"])
    try:
        if "source" in tests:
            runner.run(ast.parse(tests["source"]), tests["name"])
        else:
            runner.pairs(tests["name"], tests["inputs"], tests["outputs"])
    except (SyntaxError, ValueError) as problem:
        runner.say(unfit=f"{type(problem).__name__}: {problem}"[:SHOWN])
    os._exit(0)


if __name__ == "__main__":
    serve_answer() if sys.argv[1] == "answer" else run_tests()
