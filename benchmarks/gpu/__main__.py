"""Starts the benchmark."""

from benchmarks.gpu import measure, parser
from benchmarks.shared import run

raise SystemExit(run(parser(), measure))
