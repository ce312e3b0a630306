"""Findings of a run as data, and their renderers: terminal text, JSON, JUnit."""

from verifier.report.render_json import render_json
from verifier.report.render_junit import render_junit
from verifier.report.render_text import Detail, for_terminal, render_text
from verifier.report.report import Report, report_of

__all__ = ["Detail", "Report", "for_terminal", "render_json", "render_junit", "render_text", "report_of"]
