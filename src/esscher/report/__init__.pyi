from .page import render_page as render_page, write_report as write_report
