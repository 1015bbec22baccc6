"""One self-contained HTML page of a folder of recorded results: `lab html FOLDER`. It needs the extra `html`."""
