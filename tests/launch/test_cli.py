"""The command line itself."""

import pytest

from kvbaton import __version__
from kvbaton.cli import COMMANDS, build_parser, main


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])

    assert ended.value.code == 0
    assert capsys.readouterr().out.strip() == f"kvbaton {__version__}"


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_subcommand_has_an_implementation(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])

    assert ended.value.code == 0
    assert f"kvbaton {name}" in capsys.readouterr().out


def test_unknown_subcommand_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["upp"])

    assert ended.value.code == 2
    assert "invalid choice" in capsys.readouterr().err


def test_bad_setting_ends_with_status_two_and_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["up", "--prefill", "0"])

    assert status == 2
    assert "prefill=0 is not valid" in capsys.readouterr().err


def test_parser_lists_the_subcommands() -> None:
    text = build_parser().format_help()

    assert [name for name in COMMANDS if name not in text] == []
