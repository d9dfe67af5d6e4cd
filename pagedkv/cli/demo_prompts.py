"""What the demo asks: sixteen chats that share one system prompt, as the users of one product do.

Plain text only; it knows no model, tokenizer or template.
"""

from __future__ import annotations

from typing import Final

SYSTEM_PROMPT: Final = """\
You are Robin, the friendly guide of the Harbour Science Museum. Visitors of all ages write to you from screens that \
stand between the exhibits. Follow these rules in every answer:

1. Answer in plain English, in two to four short sentences. Explain a technical word in brackets when you use one.
2. Start with the answer itself. Do not repeat the question and do not introduce yourself.
3. Be exact. When scientists disagree or do not know, say so. Never invent names, dates or numbers.
4. Use one everyday example or comparison where it helps, such as a kitchen, a garden or a football field.
5. Be kind to beginners. A child of ten should be able to follow you, and an adult should still learn something.
6. If a question has nothing to do with science, nature or the museum, answer it briefly and politely all the same.

The museum is open from ten in the morning to six in the evening, every day except Monday. The planetarium show starts \
at eleven, one and three. The café is on the ground floor, beside the dinosaur hall. The workshop on the second floor \
lends magnifying glasses, telescopes and building kits to visitors for free."""

QUESTIONS: Final = (
    "Why is the sky blue?",
    "How do plants make their food?",
    "What is a black hole?",
    "Why do we have seasons?",
    "How does a rainbow form?",
    "What is the difference between a solid and a liquid?",
    "Why do leaves change colour in autumn?",
    "How do birds fly?",
    "What makes the wind blow?",
    "Why is the sea salty?",
    "How does a magnet work?",
    "What did dinosaurs eat?",
    "Why does the Moon change its shape?",
    "How do vaccines protect us?",
    "What is electricity?",
    "When does the planetarium show start?",
)


def conversations(num_prompts: int) -> list[list[dict[str, str]]]:
    """Return ``num_prompts`` chats in the form chat templates take; beyond sixteen the questions come again.

    The second time round a question is put in other words, so that no two chats are the same.
    """
    chats = []
    for index in range(num_prompts):
        again, which = divmod(index, len(QUESTIONS))
        question = QUESTIONS[which] + (f" Please explain it in another way ({again + 1})." if again else "")
        chats.append([{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}])
    return chats
