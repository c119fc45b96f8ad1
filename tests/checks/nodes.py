"""Do two machines get each sample once, and go on where they stood after one of them has died?

python tests/checks/nodes.py             # two nodes of two ranks each, on the CPU
python tests/checks/nodes.py --ranks 1

Each node has its own copy of the data, in another place. Neither the batch size nor the ranks
divide the sets. The second node is killed in the middle of an epoch, and both go on from the last
checkpoint. What each rank's loop got until then and from there on is compared, picture by picture,
with one process that reads the data in order, and the order with what a sampler that no loader has
seen says. The example's weights are those of as many ranks on one machine that nobody has killed.
"""

import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from itertools import chain
from pathlib import Path

import bench
import machines
import torch
import torch.distributed as dist
from bench import harness
from torch.utils.data import DataLoader, DistributedSampler

from gpuprefetch import DataPrefetcher, EncodedImageFolder, RandomResizedCrop

SCRIPT = Path(__file__).resolve()
EXAMPLES = harness.ROOT / "examples"
BATCH = 2
EPOCHS = 2
SAVE_EVERY = 2
SHARD = 7
EXAMPLE = f"data --batch-size {BATCH} --epochs {EPOCHS} --checkpoint-steps {SAVE_EVERY} --workers 1"
EXAMPLE += " --image-size 32 --model squeezenet1_1"


def digests(batch):
    pairs = zip(batch[0].contiguous().numpy(), batch[1].tolist(), strict=True)
    return [hashlib.sha256(image.tobytes() + bytes([label])).hexdigest() for image, label in pairs]


# ---- in each rank


def note(split, batch):
    """Write down what the loop gets; on a node that is to die, stop in some training step."""
    log = Path(os.environ["LOG"] + os.environ["RANK"])
    with log.open("a") as file:
        file.write(json.dumps([split, digests(batch)]) + "\n")
    while log.read_text().count("train") == int(os.environ["STOP_AT"]):
        time.sleep(1)


def train_example(words):
    """The training example as it is; each batch is noted where it is moved to the device."""
    import train

    move = train.move
    wrap = train.wrap

    def noted(batch, device):
        note("train" if torch.is_grad_enabled() else "val", batch)
        return move(batch, device)

    def wrapped(model, args):
        parallel = wrap(model, args)
        parallel.register_comm_hook(None, mean_in_order)
        return parallel

    train.move = noted
    train.wrap = wrapped
    train.main(words)


def mean_in_order(_, bucket):
    """Gradients' mean that does not depend on how DDP puts them together, anew after a first step.

    A ring adds up the parts of what it is given in orders of their own: that changes the last bit.
    """
    parts = [torch.empty_like(bucket.buffer()) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, bucket.buffer())
    future = torch.futures.Future()
    future.set_result(sum(parts) / len(parts))
    return future


def train_shards(words):
    """A loop over shards of different lengths: until no rank has a batch."""
    checkpoint = words[0].partition("=")[2]
    resume = "--resume" in words
    dist.init_process_group("gloo")
    loader = shard_loader(shard_names())
    states = [None] * dist.get_world_size()
    if resume:
        states = torch.load(checkpoint, weights_only=True)["midway"]
        loader.load_state_dict(states[dist.get_rank()]["loader"])
    batches = iter(loader)
    step = 0
    left = torch.ones(())
    while left:
        if (batch := next(batches, None)) is not None:
            note("train", batch)
        dist.all_reduce(left.fill_(batch is not None))
        if (step := step + 1) % SAVE_EVERY == 0 and not resume:
            dist.all_gather_object(states, {"loader": loader.state_dict()})
            if dist.get_rank() == 0:
                torch.save({"epoch": 0, "midway": states}, checkpoint)
    dist.destroy_process_group()


def shard_names():
    return sorted(map(str, Path("shards").iterdir()))  # without the node's folder: they are keys


def shard_loader(shards):
    import from_webdataset

    loader = DataLoader(from_webdataset.WebDatasetImages(shards, shuffle=0), BATCH, num_workers=1)
    return DataPrefetcher(loader, device="cpu", transforms=[RandomResizedCrop(32)], seed=0)


# ---- what they should get


def expected_of_example(world):
    """For each rank the batches of all epochs, from pictures that one process reads in order."""
    import train

    args = train.parse_args(EXAMPLE.split())
    args.device = torch.device("cpu")
    lines = [[] for _ in range(world)]
    for epoch in range(EPOCHS):
        for split in ("train", "val"):
            data = EncodedImageFolder(args.data / split)
            loader = DataPrefetcher(
                DataLoader(data, 5),
                device="cpu",
                transforms=train.device_transforms(args, split),
                seed=train.SEED,
            )
            loader.set_epoch(epoch if split == "train" else 0)
            pictures = list(chain.from_iterable(map(digests, loader)))
            for rank in range(world):
                order = range(rank, len(data), world)
                if split == "train":
                    order = DistributedSampler(data, world, rank, seed=0, drop_last=True)
                    order.set_epoch(epoch)
                order = [pictures[index] for index in order]
                whole = len(order) - len(order) % BATCH if split == "train" else len(order)
                lines[rank] += [
                    [split, order[at : min(at + BATCH, whole)]] for at in range(0, whole, BATCH)
                ]
    return lines


def expected_of_shards(world):
    """Whole shards for each rank, in their order; batches go across shards."""
    pictures = list(chain.from_iterable(map(digests, shard_loader(shard_names()))))
    of_shard = [pictures[at : at + SHARD] for at in range(0, len(pictures), SHARD)]
    lines = []
    for rank in range(world):
        order = list(chain.from_iterable(of_shard[rank::world]))
        lines.append([["train", order[at : at + BATCH]] for at in range(0, len(order), BATCH)])
    return lines


# ---- the check


class Check:
    def __init__(self, folder, nodes, ranks):
        self.folder = folder
        self.nodes = nodes
        self.ranks = ranks
        self.world = 2 * ranks

    def run(self, name, words, *, nodes=None, stop_at=0):
        """Both agents, or those given, to their end; returns what the loop of each rank got."""
        nodes = nodes or self.nodes
        log = self.folder / f"{name}-"
        place = [f"--nnodes={len(nodes)}", f"--nproc-per-node={self.world // len(nodes)}"]
        place += ["--rdzv-backend=c10d", f"--rdzv-id={name}"]
        place += [f"--rdzv-endpoint={nodes[0].address}:{bench.children.free_port()}"]
        agents = []
        for number, node in enumerate(nodes):
            output = Path(f"{log}{number}.txt")
            dies = stop_at * (number == 1)
            host = f"--rdzv-conf=is_host={number == 0}"  # an address need not be the host's name
            words_of_node = [*place, host, SCRIPT, "--rank", *words]
            agents.append(node.torchrun(*words_of_node, output=output, LOG=log, STOP_AT=dies))
        failed = not self.ended(agents, log, stop_at)
        for agent in agents:
            machines.kill(agent)
        if failed:
            outputs = sorted(self.folder.glob(f"{name}-*.txt"))
            raise RuntimeError("\n".join(f"{path}\n{path.read_text()}" for path in outputs))
        return self.logs(log)

    def logs(self, log):
        paths = [Path(f"{log}{rank}") for rank in range(self.world)]
        texts = [path.read_text() if path.exists() else "" for path in paths]
        return [[*map(json.loads, text.splitlines())] for text in texts]

    def ended(self, agents, log, stop_at):
        """Whether they came to their end; the second one to its own when it has to stop."""
        until = time.monotonic() + 240
        if not stop_at:
            return not any(agent.wait(until - time.monotonic()) for agent in agents)
        while max(map(trained, self.logs(log)[self.ranks :])) < stop_at:
            if agents[1].poll() is not None or time.monotonic() > until:
                return False
            time.sleep(0.05)
        machines.kill(agents[1])
        return agents[0].wait(until - time.monotonic()) != 0  # it has lost the other

    def interrupted(self, name, words, expected, *, stop_at):
        """Whether two nodes of which one dies get what is expected, each time exactly once."""
        checkpoint = self.folder / f"{name}.pt"
        words = [name, *words, f"--checkpoint={checkpoint}"]
        start = time.monotonic()
        first = self.run(f"{name}-killed", words, stop_at=stop_at)
        state = torch.load(checkpoint, weights_only=True)
        rest = self.run(f"{name}-resumed", [*words, "--resume"])
        epochs = EPOCHS if name == "example" else 1
        done = [
            state["epoch"] * len(lines) // epochs + midway["loader"]["batches"]
            for lines, midway in zip(expected, state["midway"], strict=True)
        ]
        found = [a[:at] + b for a, at, b in zip(first, done, rest, strict=True)]
        careless = [a + b for a, b in zip(first, rest, strict=True)]
        control = "missed" if careless == expected else "noticed"
        had, due = (
            Counter(p for lines in x for _, ps in lines for p in ps) for x in (found, expected)
        )
        return {
            "check": name,
            "network": self.nodes[0].network,
            "processes": self.world,
            "ok": found == expected,
            "pictures": due.total(),
            "missing": (due - had).total(),
            "repeated": (had - due).total(),
            "seconds": round(time.monotonic() - start, 1),
            "batches_before": done,
            "batches_after": [*map(len, rest)],
            "mistakes": {"no regard to the checkpoint": control},
        }

    def same_weights(self):
        """Whether the example ended as on one machine that nobody has killed."""
        words = ["example", *EXAMPLE.split(), f"--checkpoint={self.folder / 'one.pt'}"]
        self.run("one", words, nodes=self.nodes[:1])
        paths = [self.folder / f"{name}.pt" for name in ("one", "example")]
        one, two = (torch.load(path, weights_only=True)["model"] for path in paths)
        different = sum(not torch.equal(one[name], two[name]) for name in one)
        return {"check": "weights", "ok": different == 0, "different": different}


def checks(check):
    expected = expected_of_example(check.world)
    stop_at = trained(expected[0]) // EPOCHS + SAVE_EVERY + 1
    yield check.interrupted("example", EXAMPLE.split(), expected, stop_at=stop_at)
    yield check.same_weights()
    yield check.interrupted("shards", [], expected_of_shards(check.world), stop_at=5)


def trained(lines):
    return sum(split == "train" for split, _ in lines)


def draw(folder):
    """47 pictures to train on and 19 to validate with; shards of 7, the last of them of 5."""
    import draw
    import webdataset

    draw.SIDES = (60, 120)
    draw.write_folder(folder / "data", 5, 2)
    for split, count in [("train", 3), ("val", 1)]:
        for path in sorted((folder / "data" / split).rglob("*.JPEG"))[:count]:
            path.unlink()
    (folder / "shards").mkdir()
    with webdataset.ShardWriter(f"{folder}/shards/%06d.tar", maxcount=SHARD, verbose=0) as tar:
        for number, (path, label) in enumerate(EncodedImageFolder(folder / "data/train").samples):
            files = {"jpg": Path(path).read_bytes(), "cls": label}
            tar.write({"__key__": f"{number:06}", **files})


@harness.ended_by_sigterm()
def main():
    sys.path[:0] = [str(EXAMPLES / "imagenet"), str(EXAMPLES / "sources")]  # has a train.py, too
    if sys.argv[1:2] == ["--rank"]:
        run = {"example": train_example, "shards": train_shards}[sys.argv[2]]
        return run(sys.argv[3:])
    parser = harness.output_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="of each of the two nodes")
    args = parser.parse_args()
    args.output = args.output and args.output.resolve()  # before another folder is the current one
    torch.set_num_threads(1)
    document = harness.Document("nodes", args, harness.Device(), anew=True)
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder, f"node-{number}") for number in range(2)]
        draw(folders[0])
        shutil.copytree(*folders)
        os.chdir(folders[0])
        with machines.two_machines(folders) as nodes:
            for result in checks(Check(Path(folder), nodes, args.ranks)):
                document.keep(result)
                print(json.dumps(result), flush=True)
    sys.exit(bench.verdict(document.content["results"]))


if __name__ == "__main__":
    main()
