"""The run in a browser: `picture` says what is shown, `server` hands it out; page.html, page.css, page.js and draw.js
draw it. Talks to browsers and to what the other monitors read. Knows nothing of a terminal.

Nothing is built and nothing is fetched from elsewhere. Charts are uPlot's (uplot.js, MIT: uplot.LICENSE), as published.
"""
