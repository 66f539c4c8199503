import torch

from trustbatch.rollout.native.packed_prompts import pack_prompts

CPU = torch.device("cpu")


def test_what_prompts_share_has_one_row() -> None:
    packed = pack_prompts([[5, 6, 7], [5, 6, 8, 7], [9, 6]], CPU)
    # 5, 5 6, 5 6 7; 5 6 8, 5 6 8 7; 9, 9 6: the same token after other tokens is another row
    assert packed.token_ids.tolist() == [5, 6, 7, 8, 7, 9, 6]
    assert packed.row_of_token.tolist() == [[0, 1, 2, 0], [0, 1, 3, 4], [5, 6, 0, 0]]
    assert packed.position_of_row.tolist() == [0, 1, 2, 2, 3, 0, 1]
    assert packed.last_rows.tolist() == [2, 4, 6]


def test_every_token_is_found_again() -> None:
    prompts = [[1, 2, 3], [1, 2], [1, 2, 3], [4]]
    packed = pack_prompts(prompts, CPU)
    found = packed.token_ids[packed.row_of_token]
    for row, prompt in zip(found.tolist(), prompts, strict=True):
        assert row[: len(prompt)] == prompt
    assert torch.equal(found.flatten()[packed.token_of_row], packed.token_ids)
    assert packed.token_ids[packed.last_rows].tolist() == [3, 2, 3, 4]
    assert len(packed.token_ids) == 4
