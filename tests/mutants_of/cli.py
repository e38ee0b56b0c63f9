"""Mutants of cli/: the command line."""

from __future__ import annotations

from mutants_of.mutant import Mutant

MUTANTS = (
    Mutant(
        "cli/measured_step.py",
        "    return float(max(alone + 1e-3 * (seconds - once) / (later - once), alone))",
        "    return float(alone)",
        "cli/test_measured_step.py::test_the_shared_step_is_predicted_with_what_messages_take_inside",
        "a message inside a step takes what it takes alone",
        "plans for CPU ranks leave out what threads wait for a core: steps are a third longer than predicted",
    ),
    Mutant(
        "cli/seats.py",
        "        again = not began and (seat == before or seat in self.returned)",
        "        again = not began and seat == before",
        "cli/test_seats.py::test_a_seat_that_comes_and_goes_is_asked_less_and_less_often",
        "a seat that has just returned is tried again like any other",
        "a device that comes and goes eats all restarts, and the run ends of it",
    ),
    Mutant(
        "cli/seats.py",
        "        self.given_up[seat] = 2 ** (self._lost[seat] - 1)\n        self._failed",
        "        self.given_up[seat] = 1\n        self._failed",
        "cli/test_seats.py::test_a_seat_that_comes_and_goes_is_asked_less_and_less_often",
        "seats are asked after every save, however often they were lost",
        "a run restarts at every save because of one bad device",
    ),
    Mutant(
        "cli/failures.py",
        """\
    if culprits:
        return min(culprits, key=lambda failure: failure.time)""",
        """\
    if culprits:
        return min(culprits, key=lambda failure: failure.rank)""",
        "cli/test_failures.py::test_of_several_causes_the_first_in_time_counts",
        "of several failures that of the lowest rank is told",
        "a consequence is told as the cause",
        survived=True,
    ),
    Mutant(
        "cli/failures.py",
        """\
    if late:
        return min(late, key=lambda failure: failure.time)
""",
        "",
        "cli/test_failures.py::test_of_several_causes_the_first_in_time_counts",
        "who waited in vain is not asked",
        "a rank that stood still is told as killed by the system",
        survived=True,
    ),
    Mutant(
        "cli/failures.py",
        '{name}{hint}", code=128 + number)',
        '{name}{hint}", code=number)',
        "cli/test_failures.py::test_a_killed_rank_ends_the_run_as_shells_say_it",
        "a killed run ends with the bare number of a signal",
        "status 2 for SIGINT reads as bad input, and nobody tries again",
        survived=True,
    ),
    Mutant(
        "cli/failures.py",
        "    everywhere = failure.code == ConfigError.code  # bad",
        "    everywhere = False  # bad",
        "cli/test_failures.py::test_what_is_shown",
        "bad input is told as one rank's fault",
        "a typo looks like a broken machine",
    ),
    Mutant(
        "cli/pin.py",
        """\
    if usable < len(cores):
        return None""",
        """\
    if usable < num_ranks:
        return None""",
        "cli/test_pin.py::test_a_quota_that_all_ranks_fit_into_is_a_quota_still",
        "ranks are pinned under a quota that they fit into",
        "they cannot use what others leave: slower steps in containers",
        survived=True,
    ),
    Mutant(
        "cli/plot.py",
        """\
            before = None
            continue""",
        "            continue",
        "cli/test_plot.py::test_no_line_goes_over_a_gap",
        "a line is drawn over steps without a loss",
        "a run that diverged for a while looks healthy",
        survived=True,
    ),
    Mutant(
        "cli/display.py",
        "/ max(done - self.first_step, 1) * (self.steps - done)",
        "/ max(done, 1) * (self.steps - done)",
        "cli/test_display.py::test_a_resumed_run_has_its_own_pace",
        "time left from all steps, those of earlier jobs too",
        "a resumed run says that it is nearly done",
        survived=True,
    ),
    Mutant(
        "cli/display.py",
        '"".join(char if char.isprintable() else "\\ufffd" for char in seen)',
        "seen",
        "cli/test_display.py::test_what_the_model_wrote_stands_at_the_end",
        "what a model writes goes to the terminal as it is",
        "an escape sequence in a sample steers the terminal",
    ),
    Mutant(
        "cli/display.py",
        '(1e9, " B")',
        '(1e9, " G")',
        "cli/test_display.py::test_small_helpers",
        "a billion parameters told as giga",
        "`5.1 G parameters`, where everybody says B",
    ),
    Mutant(
        "cli/report.py",
        "    return 1 if failed else 0",
        "    return 0",
        "cli/test_report.py::test_conditions_decide_the_exit_status",
        "a condition that holds is only printed",
        "CI stays green",
    ),
    Mutant(
        "cli/heatmap.py",
        "part.max()))] * width",
        "part.mean()))] * width",
        "cli/test_heatmap.py::test_where_experts_are_many_the_busiest_of_neighbours_counts",
        "neighbours are averaged",
        "one hot expert of many is not seen",
    ),
    Mutant(
        "cli/words.py",
        "        elif flag.default is dataclasses.MISSING:",
        "        elif False:",
        "cli/test_words.py::test_mistakes_end_with_2_and_one_error_before_torch_is_loaded",
        "a word that is missing is not noticed",
        "`moeclipse place` without a run ends in a traceback",
    ),
    Mutant(
        "cli/terminal.py",
        "visible(text, lines=True)",
        "text",
        "cli/test_terminal.py::test_a_run_shows_names_and_notes",
        "what is drawn may hold escape sequences",
        "a column of somebody's file drives the terminal",
    ),
    Mutant(
        "cli/launcher_folder.py",
        "os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC",
        "os.O_WRONLY | os.O_APPEND | os.O_CREAT",
        "cli/test_launcher_folder.py::test_what_others_put_there_is_neither_opened_nor_removed",
        "a lock is opened whatever it is",
        "a pipe in the temporary folder holds every launcher of the host for ever",
    ),
    Mutant(
        "cli/launcher_folder.py",
        "os.rename(lock.name, Path(name) / LOCK)",
        "pass",
        "cli/test_launcher_folder.py::test_what_a_killed_launcher_left_is_removed",
        "a launcher's folder has no lock",
        "folders of killed launchers fill the disk for temporary files",
    ),
    Mutant(
        "cli/launch.py",
        "SECRET: secrets.token_hex(32)",
        'SECRET: ""',
        "cli/test_launch.py::test_ranks_get_a_secret_of_their_run_and_nobody_keeps_it",
        "ranks are started without a secret",
        "a process that joins in place of a rank signs as one",
        survived=True,
    ),
)
