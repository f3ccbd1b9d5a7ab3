"""From results to pictures; computes nothing."""

from esscher.report.page import render_page, write_report

__all__ = ["render_page", "write_report"]
