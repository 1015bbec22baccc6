"""The page of findings about FlashInfer's trace references: its code runs as it stands and prints what the page says."""

import pytest

from tests.findings import FindingsPage

PAGE = FindingsPage("flashinfer/findings.md")


@pytest.mark.parametrize("number", PAGE.numbers)
def test_a_finding_prints_what_the_page_says(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("flashinfer.trace", reason="the page is about FlashInfer's own trace references")
    exec(PAGE.code(number), {})
    assert capsys.readouterr().out == PAGE.printed(number)


def test_the_table_has_every_finding() -> None:
    PAGE.check_table()
