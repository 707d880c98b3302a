
LIMIT_S = 150
F, B = "forward", "backward"
BEST = (64, 64, 4, 2)
TRIALS = [
    ("128", F, True, 128, BEST),
    ("128", F, True, 128, BEST, {"prepare": {"maxnreg": 128}}),
    ("128", F, True, 128, BEST, {"prepare": {"maxnreg": 96}}, 32),
    ("128", F, True, 128, BEST, {"prepare": {"num_warps": 8}}, 128),
    ("128", F, True, 128, (64, 128, 4, 2), {"prepare": {"num_warps": 4}}, 128),
    ("64", F, False, 64, (64, 64, 4, 3)),
    ("64", F, False, 64, (64, 64, 4, 2), {"walk": {"maxnreg": 168}}),
    ("64", F, False, 64, (64, 64, 4, 3), {"walk": {"maxnreg": 168}}),
    ("64", F, False, 64, (64, 64, 4, 2), {"walk": {"maxnreg": 128}}),
    *(("256", F, True, 256, c) for c in [(64, 64, 4, 1), (64, 64, 4, 2), (64, 32, 4, 2)]),
    ("long", F, True, 128, (64, 64, 4, 3)),
    ("long", F, True, 128, BEST),
    *(("128", B, True, 128, BEST, {}, 64, c) for c in [(32, 64, 4, 1), (32, 64, 4, 2), (64, 64, 4, 1), (32, 128, 4, 1)]),
    ("128", B, True, 128, BEST, {"gradients": {"maxnreg": 168}}, 64, (32, 64, 4, 1)),
    ("64", B, False, 64, (64, 64, 4, 3), {}, 64, (32, 64, 4, 1)),
    ("64", B, False, 64, (64, 64, 4, 2), {"gradients": {"maxnreg": 168}}, 64, (32, 64, 4, 1)),
    *(("256", B, True, 256, (64, 64, 4, 1), {}, 64, c) for c in [(32, 64, 4, 1), (32, 64, 4, 2)]),
    ("128 -2", F, True, 128, BEST),
    ("128 1%", F, True, 128, BEST),
    ("128 -2", B, True, 128, BEST),
    ("128 1%", B, True, 128, BEST),
]
