"""[experiments]: what measurements of busrl itself set, and no ordinary run needs; the thresholds of the controller.

Declarations alone; `schema.py` puts them together. Knows nothing of files, processes or rules between keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from busrl.topology.keys import key


@dataclass(frozen=True)
class ControllerRules:
    """[experiments.controller]: the thresholds of learner.controller, with measured defaults; see docs/control.md."""

    rules: str = key("entropy", "n_min and t_max by H / H_ref, or safety, gate, noise scale and staleness",
                     choices=("entropy", "full"))  # fmt: skip
    ema: float = key(0.9, "what a smoothed number keeps of itself per step", low=0, high=1, open_high=True)
    probe_every: int = key(5, "the probe set is scored every so many steps", low=1, high=10000)
    probe_samples: int = key(32, "samples of the probe set, in whole groups of the first step", low=1, high=65536)
    reference_steps: int = key(20, "H_ref and the clip baseline are means over the first so many steps", low=1)
    high: float = key(1.3, "entropy: H / H_ref above it is high", low=0, open_low=True, high=100)
    low: float = key(0.6, "entropy: H / H_ref below it is low", low=0, open_low=True, high=100)
    hysteresis: float = key(0.1, "entropy: a band is left so far inside of its threshold", low=0, high=10)
    high_t_max_s: float = key(0.25, "entropy: t_max_s at high entropy, where it is finite", low=0, open_low=True)
    low_t_max_s: float = key(1.0, "entropy: t_max_s at low entropy, where it is finite", low=0, open_low=True)
    clip_factor: float = key(5.0, "a clip fraction above so many times its baseline is a danger", low=1, high=1e6)
    clip_floor: float = key(0.001, "least baseline of the clip fraction", low=0, open_low=True, high=1)
    ess_low: float = key(0.5, "an ESS below it is a danger", low=0, high=1)
    k3_high: float = key(0.05, "full: a k3 above it is a danger", low=0, open_low=True, high=100)
    masked_high: float = key(0.02, "full: a share of masked tokens above it is a danger", low=0, high=1)
    grad_factor: float = key(5.0, "full: a gradient norm above so many times its median is a danger", low=1, high=1e6)
    safety_cooldown: int = key(20, "full: steps of rest after a danger", low=0, high=10000)
    sigma: float = key(0.2, "full: target entropy of the gate in nats; 0 = half of H_ref, within [0.05, 1]",
                       low=0, high=100)  # fmt: skip
    gate_on: float = key(0.9, "full: the gate opens below gate_on x sigma", low=0, open_low=True, high=10)
    gate_off: float = key(1.1, "full: and closes above gate_off x sigma", low=0, open_low=True, high=10)
    collapse: float = key(0.5, "full: below collapse x sigma, streak times in a row, growth is frozen", low=0, high=10)
    streak: int = key(3, "full: decisions in a row that a reason must hold", low=1, high=1000)
    kappa: float = key(1.0, "full: wanted n_min = kappa x gradient noise scale", low=0, open_low=True, high=1000)
    grow_at: float = key(1.5, "full: n_min grows if wanted / n_min is above it", low=1, open_low=True, high=1000)
    shrink_at: float = key(0.67, "full: n_min shrinks if wanted / n_min is below it", low=0, high=1, open_high=True)
    grow: float = key(1.25, "full: n_min grows by this factor", low=1, open_low=True, high=100)
    shrink: float = key(0.8, "full: n_min shrinks by this factor", low=0, open_low=True, high=1, open_high=True)
    noise_groups: int = key(8, "full: most groups of a part when the noise scale is measured", low=1, high=65536)
    eta_min: int = key(0, "full: smallest admission bound in steps; 0 = as small as n_hi allows", low=0, high=1024)
    idle_train: float = key(0.1, "full: the bound grows if the learner idles for more than this share", low=0, high=1)
    idle_rollout: float = key(0.2, "full: the bound shrinks if the engines idle for more than this share",
                              low=0, high=1)  # fmt: skip
    ess_safe: float = key(0.8, "full: the bound grows only with an ESS above it", low=0, high=1)
    k3_safe: float = key(0.01, "full: the bound grows only with a k3 below it", low=0, open_low=True, high=100)


@dataclass(frozen=True)
class Experiments:
    """[experiments]: for measurements; each of these has been tried and is off."""

    dmmpt: str = key("off", "leave out tokens that are mastered: never, always, or while the entropy is low",
                     choices=("off", "on", "gate"))  # fmt: skip
    dmmpt_tau: float = key(0.99, "mastered: a token of a better answer with at least this probability", low=0, high=1)
    dmmpt_sigma: float = key(0.2, "nats; only in answers of lower mean entropy, and what the gate compares with",
                             low=0, open_low=True, high=100)  # fmt: skip
    forced_age: int = key(0, "publish the weights this many steps late", low=0, high=1024)
    controller: ControllerRules = field(default_factory=ControllerRules)
