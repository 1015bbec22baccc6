"""The model of a table, and each medium's rendering of it."""

import io
import json

from rich.console import Console

from lab.reports.tables import (
    Cell,
    TableReport,
    items,
    make_table,
    markdown_of,
    number,
    table_of_lines,
    table_of_records,
    terminal_of,
    words,
)
from lab.wording import UNPRINTABLE

COLUMNS = {"a": lambda row: words(row[0]), "b, µs": lambda row: number(row[1]), "c": lambda row: words(None)}


def printed(table: object) -> str:
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(table)
    return console.export_text()


def test_a_foreign_text_moves_no_cursor_and_is_no_html() -> None:
    foreign = "\x1b]0;title\x07<img src=x>\nnext\rover\ud800"
    table = table_of_lines(("kernel|s",), [(foreign,)])
    escaped = r"\x1b]0;title\x07<img src=x>" + "\n" + r"next\rover\ud800"
    assert table.rows[0][0].text == escaped
    in_markdown = escaped.replace("<", "&lt;").replace("\n", " ")
    assert markdown_of(table).splitlines() == [r"| kernel\|s |", "| --- |", f"| {in_markdown} |"]
    assert items([foreign]) == f"* {in_markdown}"


def test_a_column_that_says_one_thing_is_said_once() -> None:
    table = make_table(COLUMNS, [("x", 1), ("x", 2.5)])
    assert table.common == (("a", "x"),)
    assert [column.heading for column in table.columns] == ["b, µs"]
    assert [cell.number for (cell,) in table.rows] == [1, 2.5]


def test_only_named_columns_are_said_once_where_they_are_named() -> None:
    one = [("x", 1)]
    assert make_table(COLUMNS, one).common == ()
    assert make_table(COLUMNS, one, say_once=("a",)).common == (("a", "x"),)
    assert make_table(COLUMNS, one * 2, say_once=()).common == ()


def test_samples_stay_in_the_file_and_short_lists_are_shown() -> None:
    rows = [{"samples": [0.1] * 9, "clocks": [1, 2], "runs": [{"a": 1}], "n": n} for n in (1, 2)]
    table = table_of_records("t", "", rows)
    assert table.left_out == ("samples", "runs")
    assert table.common == (("clocks", "1, 2"),)


def test_markdown_has_the_texts_and_keeps_signs_of_tables_apart() -> None:
    table = table_of_lines(["name", "nothing", "value"], [("a|b", "", "1"), ("c\nd", "", Cell("2", 2.0))])
    assert markdown_of(table) == "| name | value |\n| --- | --- |\n| a\\|b | 1 |\n| c d | 2 |"


def test_a_terminal_has_numbers_at_the_right_and_text_as_it_is() -> None:
    table = make_table(COLUMNS, [("[bold]x[/bold]", 1), ("y", 20.5)], say_once=(), caption="A caption")
    said = printed(terminal_of(table))
    assert said.startswith("A caption")
    assert "[bold]x[/bold]" in said
    assert [line.rstrip()[-4:] for line in said.splitlines() if "x[/" in line or "y " in line] == ["   1", "20.5"]


def test_a_verdict_has_its_colour() -> None:
    (cell,) = terminal_of(table_of_lines(["verdict"], [(Cell("SLOWER", style="slower"),)])).columns[0].cells
    assert (str(cell), str(cell.style)) == ("SLOWER", "red")


def test_links_are_shown_by_their_words() -> None:
    table = table_of_lines(["findings"], [(Cell("", links=(("7", "finding-7"), ("9", "finding-9"))),)])
    assert "7 9" in printed(terminal_of(table))


def test_json_has_no_control_character_and_is_read_back() -> None:
    record = {"path": "\x1b[2J\x7f\x9b1m\ud800 µs"}
    text = TableReport((), make_table({}, ()), (), record).json()
    assert not UNPRINTABLE.search(text)
    assert json.loads(text)["path"] == record["path"]


def test_an_indented_line_is_an_item_below_the_line_before() -> None:
    assert (
        items(("2 ulp", "    lab judge --case a.json#1", "1 <b>"))
        == "* 2 ulp\n  * lab judge --case a.json#1\n* 1 &lt;b>"
    )
