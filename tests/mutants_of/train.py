"""Mutants of train/: training."""

from __future__ import annotations

from mutants_of.mutant import Mutant

MUTANTS = (
    Mutant(
        "train/optim/adamw.py",
        "and (alone or bucket.rounded is None):",
        "and bucket.rounded is None:",
        "train/test_optim_states.py::test_experts_that_move_take_the_updates_of_weights_without_a_master",
        "weights without a master are taken for rounded",
        "experts that may move never train",
    ),
    Mutant(
        "train/generate/decode_graph.py",
        "alike and self._state == state_of(self.decoder.model)",
        "alike",
        "train/generate/test_decode_graph.py::test_a_graph_serves_the_next_texts",
        "nobody looks whether weights still lie where a graph reads them",
        "texts are written by weights that are gone",
    ),
    Mutant(
        "train/optim/host_states.py",
        "                self._left[name] = self.lane.copy(TO_HOST, label, one.held, one.buffer)\n",
        "                self.lane.copy(TO_HOST, label, one.held, one.buffer)\n",
        "train/optim/test_host_states.py::test_the_same_bits_as_on_the_device",
        "nobody remembers which copy last read a buffer",
        "state is fetched over what is still being stored",
    ),
    Mutant(
        "train/optim/adamw.py",
        """\
        if self.host is not None:
            self.host.settle()
""",
        "",
        "train/optim/test_host_states.py::test_the_last_store_goes_on_while_the_next_step_computes",
        "who reads state does not wait for what is on its way back",
        "what is saved or compared is half of the last step's",
    ),
    Mutant(
        "train/optim/deferred.py",
        "model.begin_forward = partial(self.before, 0)",
        "model.begin_forward = lambda: None",
        "train/optim/test_deferred.py::test_the_same_bits_as_updates_behind_the_norm",
        "an embedding that waits for its update is read before it",
        "its rows are one update behind in every forward",
    ),
    Mutant(
        "train/optim/adamw.py",
        "            self.host.forget()\n",
        "            pass\n",
        "train/optim/test_deferred.py::test_whoever_looks_between_steps_sees_what_is_updated",
        "state that was fetched ahead stays when another is loaded",
        "a run that is resumed in place updates with the moments of before",
    ),
    Mutant(
        "train/step/clip.py",
        "self._good = loss.detach().isfinite()",
        "self._good = loss.detach() == loss.detach()",
        "train/step/test_clip.py::test_an_infinite_loss_changes_nothing",
        "an infinite loss counts as a good one",
        "layers whose gradients happen to be finite are updated with them",
    ),
    Mutant(
        "train/optim/buckets.py",
        "return earlier[-self._turns].grads, earlier[-self._turns]",
        "return earlier[-self._turns].grads, None",
        "train/step/test_clip.py::test_layers_share_memory_for_gradients_and_none_comes_too_early",
        "nobody watches whose gradients lie in shared memory",
        "a gradient that comes too early spoils another layer's update",
    ),
    Mutant(
        "train/placement/background_plan.py",
        'self.pending = None if saved is None else int(saved["asked"])',
        "self.pending = None",
        "train/placement/test_background_plan.py::test_a_plan_under_way_is_saved_and_taken_at_its_step",
        "a plan under way is forgotten",
        "resumed runs differ",
    ),
    Mutant(
        "train/placement/background_plan.py",
        'one["error"] for one in everyone if "error" in one',
        'one["error"] for one in everyone[self.mesh.stage.ranks[0]:][:1] if "error" in one',
        "train/placement/test_background_plan.py::test_stages_take_their_plans_together_or_not_at_all",
        "a stage without a plan goes on while the others vote",
        "a run with stages dies when it grows again: ranks take numbers of a step for votes",
    ),
    Mutant(
        "train/placement/model_placement.py",
        "for names in everyone for name in names",
        "for name in probe.unknown",
        "train/placement/test_background_plan.py::test_what_one_stage_could_not_tell_keeps_experts_of_all",
        "a stage that knows its costs plans without the others",
        "a run with stages ends when trials of one stage could not tell what they cost",
    ),
    Mutant(
        "train/run/choices.py",
        'if all(other.get("settled") == found["settled"] for other in stages):',
        'if found["settled"] is not None:',
        "train/run/test_choices.py::test_what_all_stages_decide_is_known_to_all_or_to_none",
        "a stage takes what another one does not know",
        "a run with stages that was killed between two files of choices cannot be resumed",
    ),
    Mutant(
        "train/config.py",
        """return "placement.reduce = 'fedavg'" if config.placement.reduce == "fedavg" else ""
""",
        """return ""
""",
        "train/placement/test_fedavg.py::test_what_a_replica_learns_from_is_no_matter_of_speed",
        "microbatches cut beside fedavg",
        "a schedule changes what each replica learns",
    ),
    Mutant(
        "train/run/run_files.py",
        """\
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)""",
        """\
            file.flush()
        os.replace(temporary, path)""",
        "train/run/test_run_files.py::test_a_text_is_durable_before_it_has_its_name",
        "a name before the text is durable",
        "after a power loss best.json is empty",
        survived=True,
    ),
    Mutant(
        "train/run/run_files.py",
        """\
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def append_line""",
        """\
        path.write_text(text)
        temporary.unlink()
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def append_line""",
        "train/run/test_run_files.py::test_a_reader_keeps_the_text_that_it_opened",
        "a text is written in place",
        "a reader sees half of it",
    ),
    Mutant(
        "train/checkpoints/disk.py",
        """\
                size += chunk.nbytes
            disk.fsync(file)
""",
        "                size += chunk.nbytes\n",
        "train/checkpoints/test_disk.py::test_a_file_is_written_hashed_and_synced",
        "files of a checkpoint are not synced",
        "a power loss leaves a checkpoint of zeros under a good name",
    ),
    Mutant(
        "train/checkpoints/disk.py",
        "        if entry.is_dir() and not entry.is_symlink():",
        "        if entry.is_dir():",
        "train/checkpoints/test_disk.py::test_a_tree_is_removed_and_links_are_not_followed",
        "links are followed when a checkpoint is removed",
        "what they point at is removed",
    ),
    Mutant(
        "train/checkpoints/disk.py",
        "open_file(path, links=False)",
        "open_file(path)",
        "train/checkpoints/test_disk.py::test_a_link_is_no_file_of_a_checkpoint",
        "links in a checkpoint are followed",
        "a checkpoint from elsewhere reads any file of this machine",
        survived=True,
    ),
    Mutant(
        "train/checkpoints/folder.py",
        """\
        raise
    disk.fsync_folder(final.parent)
""",
        "        raise\n",
        "train/checkpoints/test_folder.py::test_a_commit_is_durable",
        "a commit does not sync its folder",
        "a power loss takes back a checkpoint that was announced",
        survived=True,
    ),
    Mutant(
        "train/observe/step_times.py",
        "before + 1 if slow else max(before - 2, 0)",
        "before + 1 if slow else 0",
        "train/observe/test_stragglers.py::test_a_rank_that_recovers_now_and_then_is_named",
        "one quick step clears a slow rank",
        "a throttled GPU that recovers now and then is never named",
        survived=True,
    ),
    Mutant(
        "train/observe/step_times.py",
        """\
median(compute_ms[other] for other in others)
            before""",
        """\
median(compute_ms[other] for other in ranks)
            before""",
        "train/observe/test_stragglers.py::test_a_rank_is_held_against_the_others_alone",
        "a rank is held against itself, too",
        "of two ranks one must be two thirds slower to be named",
        survived=True,
    ),
    Mutant(
        "train/step/results.py",
        "min(2 * self.value, MOST), 0",
        "2 * self.value, 0",
        "train/step/test_loss_scale.py::test_the_factor_does_not_grow_for_ever",
        "the loss factor has no upper limit",
        "a long run overflows every thousand steps",
        survived=True,
    ),
    Mutant(
        "train/optim/adamw.py",
        "        return config.lr * (step + 1) / config.warmup_steps",
        "        return config.lr * step / config.warmup_steps",
        "train/optim/test_adamw.py::test_the_learning_rate_warms_up_and_falls_to_its_floor",
        "warm-up begins at 0",
        "the first step is computed for nothing",
    ),
    Mutant(
        "train/step/dtype.py",
        'return device.type == "cpu" if asked == "auto" else bool(asked)',
        'return asked != "auto" and bool(asked)',
        "train/test_same_numbers.py::test_no_clock_decides_a_bit",
        "CPUs choose by the clock",
        "the same seed gives other numbers",
    ),
    Mutant(
        "train/optim/bucket_contents.py",
        'part = "" if parameter.is_floating_point() else name.rpartition(".")[2]',
        'part = ""',
        "train/weights/test_base.py::test_numbers_are_quantised_while_they_are_read_and_copies_are_equal",
        "codes and factors lie in one bucket",
        "kernels cannot read codes that begin inside a word",
    ),
    Mutant(
        "train/weights/lora.py",
        "WIDE[torch.promote_types(values.dtype, a_RI.dtype)]",
        "WIDE[values.dtype]",
        "train/generate/test_adapters.py::"
        "test_merged_into_a_base_in_few_bits_it_is_what_peft_makes_of_the_decoded_weights",
        "adapters are rounded to the type of the decoded base",
        "merged weights of a float64 model are not what peft makes of them",
    ),
    Mutant(
        "train/documents/template_process.py",
        "if number > first and size + len(part) > TOGETHER:",
        "if number > first:",
        "train/documents/test_template_process.py::test_many_go_together_within_bounds",
        "each conversation goes to the template's process by itself",
        "short conversations take five times as long as the template needs for them",
    ),
    Mutant(
        "train/documents/template_process.py",
        "if ended and len(group) > 1:",
        "if False:",
        "train/documents/test_template_process.py::test_among_many_the_one_that_does_it_is_named",
        "of conversations that went together the first is blamed",
        "an error names a line that the template takes",
    ),
    Mutant(
        "train/documents/formats.py",
        "        begun.append(block[:end] if end else block)\n        size += len(begun[-1])\n",
        '        begun = [b"".join([*begun, block[:end] if end else block])]\n        size = len(begun[0])\n',
        "train/documents/test_formats.py::test_a_long_line_is_read_in_linear_time",
        "a line that goes on is copied with each block",
        "a line of 300 MiB is never read to its end",
    ),
    Mutant(
        "train/documents/formats.py",
        "        check_expansion(self._path, self._packed.tell(), self._made)\n",
        "        self._packed.tell()\n",
        "train/documents/test_formats.py::test_what_no_text_can_hold_is_refused_when_it_shows",
        "what is unpacked is not counted",
        "192 KB of zstd take 5 GB",
    ),
    Mutant(
        "train/documents/formats.py",
        "        check_expansion(path, size, sum(unpacked))\n",
        "        sum(unpacked)\n",
        "train/documents/test_formats.py::test_rows_that_refer_to_one_text_are_not_held_many_times",
        "what a Parquet file says of its own size is not looked at",
        "a few hundred bytes of Parquet take gigabytes",
    ),
    Mutant(
        "train/documents/formats.py",
        "read_dictionary=words",
        "read_dictionary=None",
        "train/documents/test_formats.py::test_rows_that_refer_to_one_text_are_not_held_many_times",
        "a text that many rows refer to is held for each",
        "531 bytes of Parquet take 2.5 GB",
    ),
    Mutant(
        "train/documents/formats.py",
        '        check_record(expanded(one), f"{path}, row {first + row}", max_record)\n',
        "        expanded(one)\n",
        "train/documents/test_formats.py::test_rows_that_refer_to_one_text_are_not_held_many_times",
        "a row of Parquet has no largest size",
        "one row takes all memory",
    ),
    Mutant(
        "train/run/run_directory.py",
        "before = os.umask(0o077)",
        "before = os.umask(0o022)",
        "train/run/test_run_directory.py::test_files_are_their_users_alone_unless_they_are_shared",
        "files of a run have the usual mode",
        "everybody on the machine reads checkpoints and losses",
    ),
    Mutant(
        "train/checkpoints/save.py",
        'say(f"warning: {visible(told)}", error=True)',
        'say(f"warning: {told}", error=True)',
        "train/checkpoints/test_save.py::"
        "test_checkpoints_that_cannot_be_removed_are_told_in_one_harmless_line",
        "the name of a folder of checkpoints is shown with its ends of lines",
        "a folder's name poses as an error of ours",
    ),
    Mutant(
        "train/step/checkpointed_state.py",
        "        self.integrity.before_save()\n",
        "",
        "train/step/test_integrity.py::test_a_state_with_a_flipped_bit_is_not_saved",
        "copies are not compared before a save",
        "a flipped bit between two checks becomes a checkpoint",
    ),
    Mutant(
        "train/step/integrity.py",
        "        found = [*self._wrong_masters(), *self._wrong_copies(False)]\n        if self",
        "        found = self._wrong_copies(False)\n        if self",
        "train/step/test_integrity.py::test_a_save_looks_at_all_that_exists_twice",
        "master weights are not held against what they were sent out as before a save",
        "a flipped bit in a master weight is saved",
        survived=True,
    ),
    Mutant(
        "train/run/run_files.py",
        'cut = before > 0 and os.pread(handle, 1, before - 1) != b"\\n"',
        "cut = False",
        "train/run/test_run_files.py::test_a_line_is_not_glued_to_one_that_was_cut",
        "a line follows at once on one that was cut",
        "the first record behind a full disk is lost",
    ),
    Mutant(
        "train/run/incidents.py",
        """\
        with contextlib.suppress(OSError):
            noticed = withdraw(directory, since)
""",
        "        noticed = withdraw(directory, since)\n",
        "train/run/test_incidents.py::"
        "test_a_log_from_which_nothing_can_be_taken_back_gets_the_record_all_the_same",
        "who cannot take back what ranks wrote writes nothing either",
        "an attempt's end is nowhere told",
        survived=True,
    ),
    Mutant(
        "train/run/choices.py",
        "        check(found)\n",
        "",
        "train/run/test_choices.py::test_what_no_run_has_written_is_refused",
        "choices are taken over unseen",
        "a damaged file ends ranks with a traceback, or lets them cut rows for others",
    ),
    Mutant(
        "train/documents/template_process.py",
        "        if isinstance(found, str) and len(found) > MOST_TEXT:",
        "        if False:",
        "train/documents/test_template_process.py::test_a_text_has_a_largest_size",
        "texts of templates have no largest size",
        "a template fills the memory of who asks it, within the time it has",
        survived=True,
    ),
    Mutant(
        "train/step/pipelined.py",
        "        return sum(self.runtime.chunks.get(m, 1) for m in passing)",
        "        return sum(self.runtime.chunks.get(m, 1) for m in range(self.config.optim.accumulate))",
        "train/step/test_pipelined.py::test_two_copies_of_the_model_add_up_what_both_compute",
        "a rank of dualpipe waits for gradients of microbatches that the other copy computes",
        "no step with two copies ends",
    ),
    Mutant(
        "train/placement/model_placement.py",
        "self.mesh.dp * (2 if self.mesh.mirrored else 1)",
        "self.mesh.dp",
        "train/placement/test_model_placement.py::test_owners_are_spread_over_all_that_hold_a_layer",
        "replicas have owners at one of both places alone",
        "with placement.slots, gradients of one direction of dualpipe are lost",
        survived=True,
    ),
    Mutant(
        "train/step/checkpointed_state.py",
        "if self.mesh.dense_grads.index == 0:",
        "if self.mesh.stage.index == 0:",
        "train/step/test_pipelined.py::test_what_two_copies_hold_alike_is_saved_once_and_compared",
        "buffers are saved by both places that hold a layer",
        "a checkpoint of dualpipe holds them twice",
        survived=True,
    ),
    Mutant(
        "train/step/integrity.py",
        "        found += self._compare(self.mesh.dense_grads, dict(self.buffers())",
        "        found += self._compare(self.mesh.stage, dict(self.buffers())",
        "train/step/test_pipelined.py::test_what_two_copies_hold_alike_is_saved_once_and_compared",
        "buffers of both places are not compared before a save",
        "a bias that a fault changed in one direction is saved",
        survived=True,
    ),
    Mutant(
        "train/predict/step_program.py",
        "mirrored = layout.num_chains > 1",
        "mirrored = False",
        "train/predict/test_step_program.py::test_the_step_of_two_directions_shares_parameters_over_both_places",
        "the program of two directions knows nothing of shared parameters",
        "what is proved and simulated is not what runs: gradients of both copies are summed by nobody",
        survived=True,
    ),
    Mutant(
        "train/predict/host_share.py",
        'if asked == "auto" and whole and later and config.optim.accumulate == 1:',
        'if asked == "auto" and whole and later:',
        "train/predict/test_host_share.py::test_gradients_on_the_host_leave_those_of_some_layers_and_are_priced",
        "gradients leave that microbatches still add to",
        "the second microbatch adds to those of another layer",
    ),
    Mutant(
        "train/optim/host_grads.py",
        "            self._left[number].get()\n\n    def sum",
        "            pass\n\n    def sum",
        "train/optim/test_host_grads.py::test_the_same_bits_as_gradients_that_stay",
        "a layer writes its gradients over those that have not left",
        "layers are updated with gradients of other layers",
    ),
    Mutant(
        "train/optim/host_grads.py",
        "            self._came.pop(number).get()",
        "            self._came.pop(number)",
        "train/optim/test_host_grads.py::test_the_same_bits_as_gradients_that_stay",
        "an update does not wait for its gradient",
        "a layer is updated with the gradient of another one",
    ),
    Mutant(
        "train/optim/host_grads.py",
        "            self._left.clear()  # all",
        "            # all",
        "train/optim/test_host_grads.py::test_a_step_that_is_interrupted_leaves_nothing_behind",
        "what left in the step before counts as gone in this one",
        "a gradient that comes too early takes the memory of one that has not left, and nobody says so",
    ),
    Mutant(
        "train/predict/step_program.py",
        "first = first_trained(config) if alone else 0",
        "first = 0",
        "train/step/test_host_inputs.py::test_what_has_left_takes_no_memory_of_the_device",
        "inputs below what is trained are waited for, which backward never asks for",
        "a run with adapters in upper layers alone stops in its first step",
    ),
    Mutant(
        "train/step/host_inputs.py",
        "        copy, buffer = self._coming.pop(key)\n        copy.get()\n",
        "        copy, buffer = self._coming.pop(key)\n",
        "train/step/test_host_inputs.py::test_the_same_bits_as_inputs_that_stay",
        "an input that is on its way back is not waited for",
        "a layer runs again from the input of another one",
    ),
    Mutant(
        "train/step/host_inputs.py",
        "while len(self._leaving) >= self.slots:",
        "while len(self._leaving) >= 100:",
        "train/step/test_host_inputs.py::test_what_has_left_takes_no_memory_of_the_device",
        "nobody waits for inputs on their way out",
        "where the wire is slow they are all on the device",
    ),
    Mutant(
        "train/step/host_inputs.py",
        "        self._next = 0\n        for",
        "        for",
        "train/step/test_host_inputs.py::test_a_step_that_is_interrupted_leaves_nothing_behind",
        "a step goes on in the program of the one that was interrupted",
        "it raises, and a run that tries again stops",
    ),
)
