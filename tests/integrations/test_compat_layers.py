"""flash_cute.compat's helpers for padded batches, and rotary embedding."""

from __future__ import annotations

import pytest
import torch

from flash_cute.compat.flash_attn import bert_padding
from flash_cute.compat.flash_attn.layers import rotary


class TestPadding:
    def test_round_trip(self, device):
        x = torch.randn(3, 5, 2, 4, device=device, requires_grad=True)
        mask = torch.tensor([[1, 1, 0, 1, 0], [0] * 5, [1] * 5], device=device)
        unused = torch.tensor([[0, 0, 1, 0, 0], [0] * 5, [0] * 5], device=device)
        tokens, indices, cu, longest, used = bert_padding.unpad_input(x, mask, unused)
        kept = (mask + unused).bool()
        assert torch.equal(tokens, x[kept]) and longest == 5
        assert torch.equal(indices, kept.flatten().nonzero().flatten())
        assert cu.tolist() == [0, 4, 4, 9] and used.tolist() == [3, 0, 5]
        assert cu.dtype == used.dtype == torch.int32
        padded = bert_padding.pad_input(tokens, indices, 3, 5)
        assert torch.equal(padded, x * kept[..., None, None])
        padded.sum().backward()
        assert torch.equal(x.grad, kept[..., None, None].expand_as(x).to(x.dtype))

    def test_concatenated_sequences(self, device):
        lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 0, 0, 0, 0, 0]], device=device)
        x = torch.randn(2, 6, 4, device=device)
        tokens, indices, cu, longest = bert_padding.unpad_input_for_concatenated_sequences(
            x, lengths
        )
        assert torch.equal(tokens, torch.cat([x[0, :5], x[1, :3]]))
        assert cu.tolist() == [0, 2, 5, 8] and longest == 3
        assert indices.tolist() == [0, 1, 2, 3, 4, 6, 7, 8]

    def test_rows(self, device):
        x = torch.randn(5, 2, 3, device=device)
        indices = torch.tensor([4, 1], device=device)
        rows = bert_padding.index_first_axis(x, indices)
        assert torch.equal(rows, x[indices])
        back = bert_padding.index_put_first_axis(rows, indices, 5)
        assert torch.equal(back[indices], rows) and back.count_nonzero() == rows.count_nonzero()
        assert bert_padding.index_first_axis_residual(x, indices)[1] is x


class TestRotary:
    @staticmethod
    def turned(x, angles, interleaved):
        """By complex numbers, of x (tokens, heads, dim) and angles (tokens, pairs)."""
        pairs = angles.shape[1]
        head, rest = x[..., : 2 * pairs].double(), x[..., 2 * pairs :]
        parts = head.unflatten(-1, (pairs, 2) if interleaved else (2, pairs))
        parts = parts if interleaved else parts.transpose(-1, -2)
        z = torch.view_as_complex(parts.contiguous())
        z = z * torch.polar(torch.ones_like(angles), angles)[:, None]
        parts = torch.view_as_real(z)
        parts = parts if interleaved else parts.transpose(-1, -2)
        return torch.cat([parts.flatten(-2), rest.double()], -1)

    @pytest.mark.parametrize("interleaved", [False, True])
    def test_angles(self, device, interleaved):
        angles = torch.rand(20, 3, device=device).double() * 6
        cos, sin = angles.cos().float(), angles.sin().float()
        x = torch.randn(2, 7, 4, 10, device=device)
        offsets = torch.tensor([2, 5], device=device)
        got = rotary.apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=offsets)
        for b, offset in enumerate((2, 5)):
            expected = self.turned(x[b], angles[offset : offset + 7], interleaved)
            torch.testing.assert_close(got[b].double(), expected, rtol=1e-5, atol=1e-5)
        cu = torch.tensor([0, 7, 14], dtype=torch.int32, device=device)
        rows = rotary.apply_rotary_emb(
            x.flatten(0, 1), cos, sin, interleaved, seqlen_offsets=offsets, cu_seqlens=cu,
            max_seqlen=7,
        )  # fmt: skip
        assert torch.equal(rows, got.flatten(0, 1))
        behind = rotary.apply_rotary_emb(x, cos[:4], sin[:4], interleaved)
        assert torch.equal(behind[:, 4:], x[:, 4:]) and not torch.equal(behind[:, 3], x[:, 3])

    def test_module(self, device):
        embedding = rotary.RotaryEmbedding(8, device=device)
        angles = torch.outer(
            torch.arange(9, device=device), 10000.0 ** (-torch.arange(0, 8, 2, device=device) / 8)
        ).double()
        qkv = torch.randn(2, 6, 3, 4, 10, device=device)
        before = qkv.clone()
        got = embedding(qkv, seqlen_offset=3)
        assert got is qkv and torch.equal(qkv[:, :, 2], before[:, :, 2])
        for part in (0, 1):
            expected = self.turned(before[1, :, part], angles[3:], False)
            torch.testing.assert_close(qkv[1, :, part].double(), expected, rtol=1e-4, atol=1e-4)
        grouped = torch.cat([before[:, :, 0], before[:, :, 1, :2], before[:, :, 2, :2]], 2)
        again = embedding(grouped, seqlen_offset=3, num_heads_q=4)
        torch.testing.assert_close(again[:, :, :4], qkv[:, :, 0])
        torch.testing.assert_close(again[:, :, 4:6], qkv[:, :, 1, :2])
        q, kv = embedding(before[:, :, 0].clone(), before[:, :, 1:].clone(), seqlen_offset=3)
        torch.testing.assert_close(q, qkv[:, :, 0])
        torch.testing.assert_close(kv, qkv[:, :, 1:])

    def test_gradient_in_place(self, device):
        x = torch.randn(1, 5, 2, 8, device=device, requires_grad=True)
        angles = torch.rand(5, 4, device=device)
        out = rotary.apply_rotary_emb(x * 1, angles.cos(), angles.sin(), inplace=True)
        dout = torch.randn_like(out)
        out.backward(dout)
        expected = rotary.apply_rotary_emb(dout, angles.cos(), -angles.sin())
        torch.testing.assert_close(x.grad, expected)

    def test_xpos(self, device):
        """q turned and scaled against k turned and scaled depends on the distance alone."""
        embedding = rotary.RotaryEmbedding(8, scale_base=512.0, device=device)
        q, k = torch.randn(2, 1, 1, 1, 8, device=device).expand(2, 1, 30, 1, 8).clone()
        q, kv = embedding(q, torch.stack([k, k], 2))
        scores = torch.einsum("bqhd,bkhd->qk", q, kv[:, :, 0])
        for distance in (0, 3, 10):
            diagonal = scores.diagonal(-distance)
            torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
