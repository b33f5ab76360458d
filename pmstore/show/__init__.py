"""Shows stores to people: pictures of arrays (picture.py), a live view of a training run (live.py),
a report as one HTML file (report_page.py)."""
