"""One self-contained HTML page of a folder of recorded results: `python -m lab.html_report FOLDER`. Needs the extra `html`."""
