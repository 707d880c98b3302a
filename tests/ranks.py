"""Processes that share one import, and a pool of them that are ranks of gloo groups and serve every test."""

import datetime
import multiprocessing
import os
import sys
import time
import traceback
from unittest import mock

import torch
from torch import distributed as dist

LIMIT = datetime.timedelta(seconds=20)
SHORT = datetime.timedelta(seconds=3)


def serve(rank, size, port, pipe):
    """Rank `rank` of `size`: run what comes through the pipe, `(function, name of a group, arguments)`."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, timeout=LIMIT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=LIMIT)
    groups = {}
    while True:
        function, name, args = pipe.recv()
        began = time.monotonic()
        try:
            if function is None:  # args: how many ranks, time limit
                n, limit = args
                groups[name] = dist.new_group(range(n), timeout=limit), limit
                pipe.send((True, None))
            else:
                group, limit = groups[name]
                group.get_group_store().set_timeout(limit)  # all groups share one store, which has one limit
                pipe.send((True, function(rank, group, *args)))
        except Exception as error:
            pipe.send((False, (str(error), time.monotonic() - began, traceback.format_exc())))


#: processes of it are forked from a server, which imports the package once
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["cases", "gla_ref.context_parallel"])


def start(processes):
    # the server imports by its environment, not by our sys.path
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        for process in processes:
            process.start()


class Pool:
    def __init__(self, size):
        # in this process, so that it outlives every rank
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.pipes, self.processes, self.groups = [], [], {}
        for rank in range(size):
            here, there = CONTEXT.Pipe()
            self.pipes.append(here)
            self.processes.append(CONTEXT.Process(target=serve, args=(rank, size, self.store.port, there), daemon=True))
        start(self.processes)

    def group(self, name, n, limit=LIMIT):
        """A new group of the first n ranks, to be asked for by its name; all ranks take part in making it.

        Its ranks wait for each other as long as `limit` says, for messages and for answers in the store.
        """
        if name not in self.groups:
            self.groups[name] = n
            for pipe in self.pipes:
                pipe.send((None, name, (n, limit)))
            answers = [pipe.recv() for pipe in self.pipes]
            assert all(ok for ok, _ in answers), answers
        return name

    def tell(self, name, function, *args):
        """Each rank's result, or its error: [(whether it is one, result or (message, seconds, traceback))]."""
        pipes = self.pipes[: self.groups[name]]
        for pipe in pipes:
            pipe.send((function, name, args))
        return [answer(pipe) for pipe in pipes]

    def ask(self, group, function, *args):
        """The results of the ranks of a group, by its name, or of the first so many ranks; no rank may fail."""
        answers = self.tell(group if isinstance(group, str) else self.group(f"{group}", group), function, *args)
        for ok, result in answers:
            assert ok, result[-1]
        return [result for _, result in answers]

    def close(self):
        for process in self.processes:
            process.kill()
            process.join()


def answer(pipe):
    try:
        return pipe.recv() if pipe.poll(60) else (False, ("no answer", 60, ""))
    except EOFError:
        return False, ("dead", 0, "")
