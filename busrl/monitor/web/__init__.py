"""The run in a browser: `picture` says what is shown, `server` hands it out, and page.html, page.css and page.js draw it.

Nothing is built and nothing is fetched from elsewhere. Charts are uPlot's (uplot.js, MIT: uplot.LICENSE), as published.
"""
