"""A transformers model on flashspan's attention: the same logits, the same gradients, the same text. No download.

pip install 'flashspan[transformers]'
python examples/transformers_drop_in.py
"""

import torch
from transformers import MistralConfig, MistralForCausalLM

import flashspan.integrations.transformers as span

span.register()  # once; then every model accepts attn_implementation="span"

torch.manual_seed(0)
config = MistralConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=2, sliding_window=16, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    initializer_range=0.2,
)  # fmt: skip
model = MistralForCausalLM._from_config(config, attn_implementation="eager").eval()

tokens = torch.randint(1, 256, (2, 48))
attention_mask = torch.ones_like(tokens)
attention_mask[0, :10] = 0  # the first sequence is shorter: padded on the left


def run(attention: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits and gradient of a model's real tokens, and the text it continues with."""
    model.set_attn_implementation(attention)
    model.zero_grad()
    logits = model(tokens, attention_mask=attention_mask).logits[attention_mask.bool()]
    torch.manual_seed(1)
    logits.backward(torch.randn_like(logits))
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    how = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": "static"}
    text = model.generate(tokens, attention_mask=attention_mask, **how)
    return logits.detach(), gradient, text[:, tokens.shape[1] :]


eager, ours = run("eager"), run("span")
for name, one, two in zip(("logits", "gradients"), eager, ours, strict=False):
    difference = float((two - one).norm() / one.norm())
    print(f"{name}: relative difference from eager {difference:.1e}")
    assert difference < 1e-5
print(f"greedy text, eager: {eager[2].tolist()}")
print(f"greedy text, span:  {ours[2].tolist()}")
assert torch.equal(eager[2], ours[2])
print("the same text")
