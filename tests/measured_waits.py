"""Records like those of benchmarks/waits.py, made up: for tests of what is drawn from them."""


def role(name, sites, first, period, waits):
    """A role whose chunks begin `period` ns apart. It waits so many ns at each site and works 100 ns after it."""
    chunks = []
    for c in range(8):
        now, chunk = first + c * period, []
        for spent in waits:
            chunk.append([now, now + spent])
            now += spent + 100
        chunks.append(chunk)
    shares = [spent / period for spent in waits]
    return dict(role=name, sites=list(sites), waits=shares, us_a_chunk=period / 1e3, first=60, chunks=chunks)


def record(kernel, *roles):
    shape = dict(B=8, T=8192, H=16, HV=16, K=128, V=128)
    return dict(
        kernel=kernel, **shape, ms=0.7, ms_call=0.7, ms_clocked=0.71, error=3e-3, budget=9e-3, roles=list(roles)
    )


FUSED = record(
    "fused",
    role("walker 0", ("ready", "solved"), 9000, 5000, (200, 1500)),
    role("walker 1", ("ready", "solved"), 9100, 5000, (100, 1500)),
    role("solver", ("ready", "done of c - TURNS", "done of c - 1"), 4000, 5000, (0, 50, 300)),
    role("loader", ("done of c - STAGES", "done of c - STAGES_V"), 0, 5000, (4500, 200)),
)
IN_TURN = record(
    "in turn",
    role("group 0", ("ready", "done of c - 1", "made"), 6100, 6000, (0, 30, 40)),
    role("group 1", ("ready", "done of c - 1", "made"), 6000, 6000, (10, 30, 2500)),
    role("loader", ("done of c - STAGES",), 0, 6000, (5800,)),
)
DATA = {
    "environment": {"gpu": "NVIDIA H200", "torch": "2.11.0+cu128", "triton": "3.6.0"},
    "waits": [IN_TURN, FUSED, FUSED | {"kernel": "ahead", "B": 1}, FUSED | {"B": 1, "roles": []}],
}
