"""FX passes that give draft subgraphs their own workspace lane."""

if __name__ != "dsv4_ops.passes":
    raise ImportError("import dsv4_ops.passes, not the checkout's passes/ folder")
