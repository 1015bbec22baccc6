"""The page of findings about SGLang: its code runs as it stands, against SGLang's own wheel, and prints what the page says."""

import pytest

from tests.devices import IN_INTERPRETER
from tests.findings import FindingsPage

PAGE = FindingsPage("sglang/findings.md")


@IN_INTERPRETER
@pytest.mark.parametrize("number", PAGE.numbers)
def test_a_finding_prints_what_the_page_says(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(PAGE.code(number), {})
    assert capsys.readouterr().out == PAGE.printed(number)


def test_the_table_has_every_finding() -> None:
    PAGE.check_table()
