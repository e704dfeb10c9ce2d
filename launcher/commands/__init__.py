"""The subcommands of ``megakv``, one file each: `add_arguments` says what it takes, `run` does it.

What `run` returns is printed as JSON. Only the file of the command that was given is imported.
"""

SUMMARIES = {
    "run": "Start ranks that read a document together and answer questions about it.",
    "chat": "Talk with a model about a document, in sessions that stay sharded over the ranks.",
    "serve": "Answer many over HTTP: OpenAI's endpoints and a page; what was read of a prompt is kept.",
    "info": "This machine, the versions in use, and the methods to choose from.",
    "check": "Read a run's JSON, or a model's folder, and say what it wants.",
    "timeline": "Draw a run's report, as a picture and as a trace for chrome://tracing or Perfetto.",
    "report": "Write one HTML page, with nothing outside it, about one or several runs side by side.",
    "profile": "Measure this machine's compute, memory and links once, for the choice of methods.",
    "fit-policy": "Time pass-KV against pass-Q at many (T, P) and fit the rule of the policy ``fitted``.",
    "search-partition": "Search on real ranks for the partitions with which KV-Runahead is fastest, and keep them.",
    "fairkv": "Profile what KV heads keep, map them to ranks, or both and what that gains: profile, map, place.",
    "plan": "Rank what can be run on some machines, and write the JSON of the best.",
    "simulate": "Play a run through, event by event: slow ranks, slow links and noise included.",
    "dry-run": "Build the ranks of a run without weights, check all shapes and shards, and add up memory per rank.",
}
EXTRA_OF = {
    "serve": "serve",
    "timeline": "report",
    "report": "report",
    "fit-policy": "plan",
    "profile": "plan",
    "plan": "plan",
}
"""Extras that commands need from their first moment on."""
