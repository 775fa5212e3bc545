"""The conversation that the demonstration goes on with: long enough that its KV is worth moving."""

from kvrelay.client import Message

CHAT = (
    Message("system", "You are a friendly science teacher. Answer clearly, in a few short sentences."),
    Message("user", "What is light made of?"),
    Message(
        "assistant",
        "Light is made of waves of electric and magnetic fields. It also comes in tiny packets of energy called "
        "photons. The light from the Sun looks white, but it is a mixture of all the colours of the rainbow: red, "
        "orange, yellow, green, blue and violet.",
    ),
    Message("user", "What makes the colours different from each other?"),
    Message(
        "assistant",
        "Each colour has its own wavelength, which is the distance from one crest of the wave to the next. Red "
        "light has the longest wavelength, about 700 nanometres. Blue and violet light have the shortest "
        "wavelengths, about 400 to 450 nanometres. Our eyes see each wavelength as a different colour.",
    ),
    Message("user", "What happens when sunlight meets the air?"),
    Message(
        "assistant",
        "The air is made of tiny molecules, mostly nitrogen and oxygen. When sunlight passes through the air, the "
        "molecules scatter some of it in all directions. Short wavelengths are scattered much more strongly than "
        "long ones: blue light is scattered several times more than red light. This is called Rayleigh "
        "scattering, after the physicist Lord Rayleigh.",
    ),
    Message("user", "Does the light travel through the same amount of air all day?"),
    Message(
        "assistant",
        "No. At noon the Sun is high and its light takes a short path through the air. In the morning and in the "
        "evening the Sun is low, and its light has to travel through much more air before it reaches our eyes.",
    ),
)

FIRST_QUESTION = "So why is the sky blue?"
SECOND_QUESTION = "And why are sunsets red?"
