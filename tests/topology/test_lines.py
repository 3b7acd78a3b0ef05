"""The line of every key, for whatever a TOML file may look like."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from busrl.topology.reader import parse_value, positions, tomllib

TEXT = '''\
# a comment with [brackets] and = signs
[run]  # another
name = "a # no comment"   # a comment
seed = 1

[learner]
"lr" = 1e-3
betas = [  # over
  0.9,     # several
  0.99,
]
trigger.n_min = 3
text = """
[no.table]
key = 1 \\"""
"""
raw = \'\'\'
x = 1\'\'\'\'

[learner.more]
a = { b = 1, c = [1, 2], "d e" = { f = 3 } }

[[process]]
role = "rollout"
env = { A = "}" }

[[process]]
role = 'reward'
  [process.env]
  B = "]"
'''


def test_keys_are_found_in_every_form_that_toml_has() -> None:
    tomllib.loads(TEXT)  # the text is one
    lines = positions(TEXT)
    expected = {
        ("run",): 2, ("run", "name"): 3, ("run", "seed"): 4, ("learner",): 6, ("learner", "lr"): 7,
        ("learner", "betas"): 8, ("learner", "betas", 1): 10, ("learner", "trigger"): 12,
        ("learner", "trigger", "n_min"): 12, ("learner", "text"): 13, ("learner", "raw"): 17,
        ("learner", "more"): 20, ("learner", "more", "a"): 21, ("learner", "more", "a", "c"): 21,
        ("learner", "more", "a", "d e", "f"): 21, ("process",): 23, ("process", 0): 23, ("process", 0, "role"): 24,
        ("process", 0, "env", "A"): 25, ("process", 1): 27, ("process", 1, "role"): 28,
        ("process", 1, "env", "B"): 30,
    }
    assert {path: lines.get(path) for path in expected} == expected
    assert ("learner", "key") not in lines


def test_windows_line_ends_count_once() -> None:
    assert positions("[a]\r\nb = 1\r\n\r\nc = '''x\r\ny'''\r\nd = 2\r\n") == {
        ("a",): 1, ("a", "b"): 2, ("a", "c"): 4, ("a", "d"): 6,
    }


names = st.text("abc_-09", min_size=1, max_size=4)
quoted = st.text(st.characters(codec="ascii", exclude_categories=["Cc"], exclude_characters="\\\"'"), max_size=8)
scalars = st.one_of(
    st.integers(-9, 9).map(str),
    st.booleans().map(lambda flag: str(flag).lower()),
    quoted.map(lambda text: f'"{text}"'),
    quoted.map(lambda text: f"'{text}'"),
    quoted.map(lambda text: f'"""\n{text}\n"""'),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: "[ " + " ,\n# ] comment\n ".join(items) + " ]"),
        st.dictionaries(names, scalars, max_size=3).map(
            lambda table: "{ " + ", ".join(f"{name} = {value}" for name, value in table.items()) + " }"
        ),
    ),
    max_leaves=6,
)
documents = st.dictionaries(names, st.dictionaries(names, values, max_size=4), max_size=4)


@given(documents)
def test_every_key_of_an_accepted_text_has_its_line(tables: dict[str, dict[str, str]]) -> None:
    lines: list[str] = []
    expected = {}
    for table, keys in tables.items():
        lines += ["", f"[{table}] # {{"]
        expected[(table,)] = len(lines)
        for key, value in keys.items():
            expected[(table, key)] = len(lines) + 1
            lines += f"{key} = {value}  # '".split("\n")
    text = "\n".join(lines)
    tomllib.loads(text)
    line_of = positions(text)
    assert {path: line_of.get(path) for path in expected} == expected


@given(st.text(max_size=20))
def test_an_override_is_a_value_of_toml_or_its_own_text(text: str) -> None:
    try:
        parsed = tomllib.loads(f"value = {text}\n")
    except tomllib.TOMLDecodeError:
        parsed = {}
    assert repr(parse_value(text)) == repr(parsed["value"] if [*parsed] == ["value"] else text.strip())
