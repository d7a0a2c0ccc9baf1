from breakgraph.engine.request import Request
from breakgraph.engine.sampling import SamplingParams
from breakgraph.engine.scheduler import ScheduledRow, ScheduledStep
from breakgraph.engine.step_batch import build_batch


def make_request(prompt: list[int], computed: int, blocks: list[int], output: list[int]) -> Request:
    request = Request(
        request_id="r",
        prompt=None,
        prompt_token_ids=prompt,
        params=SamplingParams(),
        max_total_tokens=len(prompt) + 16,
        output_token_ids=output,
    )
    request.num_computed_tokens, request.block_ids = computed, blocks
    return request


def test_a_mixed_step_is_packed_row_after_row() -> None:
    decoding = make_request([10, 11, 12], computed=4, blocks=[3, 9], output=[20, 21])
    chunk = make_request([30, 31, 32, 33, 34, 35, 36], computed=2, blocks=[5, 2, 8], output=[])
    step = ScheduledStep((ScheduledRow(decoding, 1), ScheduledRow(chunk, 4)), is_decode=False)
    batch = build_batch(step, block_size=4)

    assert list(batch.input_ids) == [21, 32, 33, 34, 35]
    assert list(batch.positions) == [4, 2, 3, 4, 5]
    # block 9 offset 0; blocks 5 and 2 around the block border at position 4
    assert list(batch.slot_mapping) == [36, 22, 23, 8, 9]
    assert (list(batch.q_lens), list(batch.seq_lens), list(batch.logits_rows)) == ([1, 4], [5, 6], [0, 4])
    assert [list(table) for table in batch.block_tables] == [[3, 9], [5, 2]]
    batch.check()


def test_block_tables_end_with_the_step_not_with_the_reservation() -> None:
    request = make_request([1, 2, 3, 4], computed=0, blocks=[7, 6, 5], output=[])
    batch = build_batch(ScheduledStep((ScheduledRow(request, 4),), is_decode=False), block_size=4)
    assert [list(table) for table in batch.block_tables] == [[7]]
