"""Several seats of one model, and several models, in one run: what only such runs need.

A model plays one seat of an episode or more, and each seat has a group for every draw. The core works on one model at
a time, and knows this part by the table of parts alone.

- Before a run: `topologies` reads `[[model]]`, `rules` and `seat_rules` refuse what does not go together, `explained`
  prints the sums.
- For the scheduler: `draws` decides what is opened and in which order, `opening` does it. For the keeper: `keeping`.
- For engines and learners: `followed` gives an engine the checkpoints of another model; `together` is a process of
  several models, `shared_rollout` (with `shared_engine`) and `shared_learner` are the two kinds of it.
- For people: `seat_figures` in the metrics, `summaries` while a run goes and at its end, `audit` after it.
"""
