"""The simulator: a run on a virtual clock, with the decisions of the live roles and service times instead of work.

Uses `busrl.scheduling` as it is, the topology, traces, and the files of a finished run. Starts no process, loads no
torch.

world    the event queue; drives the rest            answers  lengths and rewards of every draw
actors   decoding in rows, weight stalls             times    service times, stated or fitted
ring     slots, lines, fates                         fit      times and answers of a recorded run
pacing, sources  where times and answers come from   shipped  those of the quickstart
learner  carries out LearnerPlan                     figures  what is counted
scheduler, feed  what a look opens, as live      report, sweep, picture: tables for people
"""

from busrl.simulate.actors import Times
from busrl.simulate.answers import Answer, Answers, Recorded, RecordedAnswers, TraceAnswers
from busrl.simulate.figures import Figures
from busrl.simulate.world import World

__all__ = ["Answer", "Answers", "Figures", "Recorded", "RecordedAnswers", "Times", "TraceAnswers", "World"]
