"""A Ray cluster of three nodes on this machine: `python ray_cluster.py` prints its address, then obeys lines of its
standard input: "remove NAME" and "add NAME" for a node with a resource of that name. It ends with its input."""

import sys

from ray.cluster_utils import Cluster

NAMES = ("gpu-0", "gpu-1")


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    nodes = {name: cluster.add_node(num_cpus=1, resources={name: 1}) for name in NAMES}
    cluster.wait_for_nodes()
    print(cluster.address, flush=True)
    try:
        for line in sys.stdin:
            verb, name = line.split()
            if verb == "remove":
                cluster.remove_node(nodes.pop(name))
            else:
                nodes[name] = cluster.add_node(num_cpus=1, resources={name: 1})
            print("done", flush=True)
    finally:
        cluster.shutdown()


main()
