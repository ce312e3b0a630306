"""Findings of a run as data, and their renderers: terminal text, JSON, JUnit."""

from verifier.report.render_data import render_json, render_junit
from verifier.report.render_text import render_text
from verifier.report.report import Report, report_of

__all__ = ["Report", "render_json", "render_junit", "render_text", "report_of"]
