"""A run in a browser: `picture` makes the data, `server` serves them; page.html, page.css, page.js and draw.js draw
them. Knows nothing of a terminal.

The page is not built, and fetches nothing from elsewhere. Charts are drawn by uPlot (uplot.js, MIT: uplot.LICENSE), as
published.
"""
