"""The pictures need matplotlib, which the extra `plots` brings."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("matplotlib") else ["test_*.py"]
