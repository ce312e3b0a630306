"""Progress without a terminal: one plain line a stage on stderr, and none where it is asked for."""

from verifier.report.progress import shown_progress


def test_a_file_gets_one_line_a_stage(capsys):
    with shown_progress("roundtrip") as progress:
        progress("starting the engine")
        progress("syncing")
    out, err = capsys.readouterr()
    assert (out, err) == ("", "roundtrip: 0 s: starting the engine\nroundtrip: 0 s: syncing\n")


def test_the_shortest_answer_has_none(capsys):
    with shown_progress("roundtrip", silent=True) as progress:
        progress("starting the engine")
    assert capsys.readouterr().err == ""
