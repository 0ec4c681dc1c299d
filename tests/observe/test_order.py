"""What observers are told, in every order that the simulator finds: each life from its begin to its end, once."""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import partial

from opentelemetry.sdk.trace import TracerProvider

from tectum.observe.metrics import Metrics
from tectum.observe.trace import Tracing
from tectum.observe.watcher import Watcher
from tectum.pipeline.pipeline import Pipeline
from tests.sim import shell

SEEDS = 80


class Told(Watcher):
    """Notes what it is told of each life."""

    def __init__(self):
        self.lives = defaultdict(list)

    def accepted(self, job, seconds):
        self.lives[job.life].append("accepted")

    def batch(self, jobs):
        for job in jobs:
            self.lives[job.life].append("batch")

    def sent(self, job, backend, seconds, error):
        self.lives[job.life].append("sent")

    def ended(self, job, reason, error, seconds):
        self.lives[job.life].append("ended")

    def freed(self, job):
        self.lives[job.life].append("freed")


def test_each_life_is_told_in_order_and_leaves_no_span_open(monkeypatch, caplog):
    seen = Counter()
    for seed in range(SEEDS):
        told, tracing = Told(), Tracing(TracerProvider(shutdown_on_exit=False))
        monkeypatch.setattr(shell, "Pipeline", partial(Pipeline, observers=(told, tracing, Metrics())))
        assert not shell.run_seed(seed).failure
        assert not tracing._walks, f"seed {seed}: a walk outlives its request"
        for life, steps in told.lives.items():
            assert steps[0] == "accepted", (seed, life, steps)
            assert steps[-1] == "freed", (seed, life, steps)
            assert Counter(steps).items() >= {"accepted": 1, "ended": 1, "freed": 1}.items(), (seed, life, steps)
            seen[tuple(steps)] += 1
    assert "an observer failed" not in caplog.text
    assert seen.total() > 200, "the simulator hardly did anything"
    assert any("sent" in steps[steps.index("ended") :] for steps in seen), "no send drained after a release"
