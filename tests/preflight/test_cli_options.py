"""Times and sizes on the command line: what is no number above 0 is refused before anything else is looked at."""

from __future__ import annotations

import pytest

from busrl.cli import main


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "ten"])
@pytest.mark.parametrize(
    "arguments",
    [
        ("monitor", "--once", "--seconds"),
        ("record", "-o", "x.rec", "--seconds"),
        ("record", "-o", "x.rec", "--limit"),
        ("replay", "x.rec", "--wait"),
        ("stop", "run", "--wait"),
        ("keys", "try", "tcp://host:5600", "key", "--wait"),
    ],
)
def test_a_time_or_size_must_be_a_number_above_0(
    arguments: tuple[str, ...], value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*arguments, value])
    assert ended.value.code == 2
    assert f"argument {arguments[-1]}: {value}: expected a number above 0" in capsys.readouterr().err
