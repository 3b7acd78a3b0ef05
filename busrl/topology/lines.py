"""The line of every key of a TOML text, which the standard library's parser does not tell.

Walks a text that the parser has already accepted, so it may be lenient: it only has to know where keys, strings,
arrays and inline tables begin and end. Knows nothing of what the keys mean.

- A path is a tuple of key names and array indices: ("process", 1, "count").
- Every key, table header and array element of tables has the line on which it begins.
"""

from __future__ import annotations

Path = tuple["str | int", ...]


def positions(text: str) -> dict[Path, int]:
    """Line numbers, from 1, of all keys and tables of an accepted TOML text."""
    scanner = _Scanner(text.replace("\r\n", "\n"))
    scanner.document()
    return scanner.lines


class _Scanner:
    """A cursor over the text and what it found."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.lines: dict[Path, int] = {}
        self._arrays: dict[Path, int] = {}  # path of an array of tables -> index of its newest element

    def document(self) -> None:
        prefix: Path = ()
        while self._skip_blank():
            if self.text[self.at] == "[":
                prefix = self._header()
            else:
                self._assignment(prefix)

    def _line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1

    def _peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def _skip_blank(self) -> bool:
        """Past white space, newlines and comments; False at the end."""
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            elif char in " \t\r\n":
                self.at += 1
            else:
                return True
        return False

    def _spaces(self) -> None:
        while self._peek() and self._peek() in " \t":
            self.at += 1

    def _header(self) -> Path:
        line, double = self._line(), self.text.startswith("[[", self.at)
        self.at += 2 if double else 1
        keys = self._keys()
        self.at += 2 if double else 1
        path = (*self._walk((), keys[:-1]), keys[-1])
        self.lines.setdefault(path, line)
        if double:
            self._arrays[path] = self._arrays.get(path, -1) + 1
            path += (self._arrays[path],)
            self.lines[path] = line
        return path

    def _walk(self, prefix: Path, keys: list[str]) -> Path:
        """The path of a dotted name: an array of tables on the way means its newest element."""
        for name in keys:
            prefix += (name,)
            if prefix in self._arrays:
                prefix += (self._arrays[prefix],)
        return prefix

    def _keys(self) -> list[str]:
        """A dotted key; the cursor ends on what follows it (= or a bracket)."""
        names = []
        while True:
            self._spaces()
            names.append(self._name())
            self._spaces()
            if self._peek() != ".":
                return names
            self.at += 1

    def _name(self) -> str:
        start = self.at
        if self._peek() in ('"', "'"):
            self._string()
            return self.text[start + 1 : self.at - 1]
        while self._peek() and self._peek() not in " \t.=]\n":
            self.at += 1
        return self.text[start : self.at]

    def _assignment(self, prefix: Path) -> None:
        line, start = self._line(), self.at
        keys = self._keys()
        if self._peek() != "=" or self.at == start:
            raise ValueError(f"line {line}: not a key: the text was not accepted by a TOML parser")
        for depth in range(1, len(keys) + 1):
            self.lines.setdefault(prefix + tuple(keys[:depth]), line)
        self.at += 1
        self._spaces()
        self._value(prefix + tuple(keys))

    def _value(self, path: Path) -> None:
        char = self._peek()
        if char in ('"', "'"):
            self._string()
        elif char == "[":
            self._array(path)
        elif char == "{":
            self._inline_table(path)
        else:
            while self._peek() and self._peek() not in ",]}#\n":
                self.at += 1

    def _string(self) -> None:
        quote = self.text[self.at]
        fence = quote * 3 if self.text.startswith(quote * 3, self.at) else quote
        self.at += len(fence)
        while not self.text.startswith(fence, self.at):
            self.at += 2 if quote == '"' and self._peek() == "\\" else 1
            if self.at > len(self.text):
                raise ValueError("a string does not end: the text was not accepted by a TOML parser")
        self.at += len(fence)
        while len(fence) == 3 and self._peek() == quote:  # a fence may be preceded by one or two quotes
            self.at += 1

    def _array(self, path: Path) -> None:
        self.at += 1
        index = 0
        while self._skip_blank() and self._peek() != "]":
            if self._peek() == ",":
                self.at += 1
                continue
            element = (*path, index)
            self.lines[element] = self._line()
            self._value(element)
            index += 1
        self.at += 1

    def _inline_table(self, path: Path) -> None:
        self.at += 1
        while self._skip_blank() and self._peek() != "}":
            if self._peek() == ",":
                self.at += 1
                continue
            self._assignment(path)
        self.at += 1
