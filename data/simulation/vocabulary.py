"""Words of the simulated chats: names, matters with their progressions, and side talk.

Training and held-out dialogues draw their names from different lists, so that a Writer that learnt names by heart fails.
"""

from __future__ import annotations

from dataclasses import dataclass

TRAIN_NAMES = tuple(
    """Ada Adam Aisha Alan Alba Alma Amir Amy Ana Andre Anna Anton Aria Arthur Aya Bea Beth Boris Carla Carlos Cara Celia Chen
    Clara Colin Daisy Dana Daniel Dario Diego Dora Edith Eli Elena Elsa Emil Emma Eric Esther Eva Felix Fiona Flora Frank Gina
    Grace Greta Hana Harry Hassan Heidi Helen Hugo Ida Igor Ines Iris Isaac Ivan Jack Jade Jana Jared Jonas Joel Julia Karim
    Karl Kate Kenji Kira Lara Laura Lena Leo Lily Lina Linda Lola Lucas Lucy Luis Maia Marco Maria Mark Marta Max Maya Mia Mila
    Mona Nadia Nina Noah Nora Olga Oliver Omar Oscar Otto Paul Paula Peter Petra Pia Ravi Rita Robin Rosa Ruby Ruth Sam Sana
    Sara Simon Sofia Stella Sven Tara Theo Tim Tina Tom Uma Vera Victor Viola Walter Wendy Yara Yuki Zara Zoe""".split()
)
HELDOUT_NAMES = tuple(
    """Abel Agnes Amara Arlo Astrid Bella Bruno Cecil Cora Cyrus Delia Dylan Edgar Elisa Enzo Faye Fred Gail Gemma Gloria Gwen
    Hector Holly Imani Irene Jasper Joan Jude Kai Kamal Layla Lewis Lorna Mabel Magnus Marvin Mei Milo Naomi Nico Odette Olive
    Owen Pearl Phil Priya Quinn Rhea Roman Rufus Sasha Selma Silas Tessa Tobias Ursula Vince Wanda Xenia Zeno""".split()
)


@dataclass(frozen=True, slots=True)
class MatterKind:
    """One kind of thing that can be remembered.

    Templates use `{p}` (person), `{v}` (value) and, in `told`, nothing else: the speaker is implied.

    Args:
        key: Identifies the kind.
        kind: Record kind.
        said: How the person says it.
        told: How somebody else says it about the person.
        moved: How the person says that it has moved on.
        told_moved: How somebody else says that it has moved on.
        content: The record.
        values: Possible values; a progression takes another one.
        question: Question for the present value; its answer is the value.
    """

    key: str
    kind: str
    said: tuple[str, ...]
    told: tuple[str, ...]
    moved: tuple[str, ...]
    told_moved: tuple[str, ...]
    content: str
    values: tuple[str, ...]
    question: str


_CITIES = tuple(
    """Leeds Porto Lyon Turin Bergen Gdansk Malaga Ghent Cork Bremen Oslo Riga Bonn Nantes Siena Tampere Basel Utrecht Graz Split
    Seville Dublin Prague Vienna Madrid Lisbon Athens Naples York Bristol Dover Geneva Krakow Zagreb Tunis Cairo Delhi Kyoto
    Osaka Seoul Lima Quito Boston Austin Denver Halifax""".split()
)
_JOBS = (
    "nurse", "baker", "plumber", "teacher", "lawyer", "florist", "chef", "pilot", "dentist", "carpenter", "translator",
    "librarian", "gardener", "tailor", "architect", "barber", "welder", "editor", "referee", "tutor", "cashier", "farmer",
    "driver", "painter",
)  # fmt: skip
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = ("January", "March", "April", "May", "June", "July", "August", "October", "November")
_PETS = (
    "cat",
    "dog",
    "parrot",
    "rabbit",
    "hamster",
    "turtle",
    "pony",
    "ferret",
    "canary",
    "goat",
    "lizard",
    "goldfish",
)
_FOODS = (
    "nuts", "cheese", "shrimp", "eggs", "mushrooms", "onions", "bread", "pork", "celery", "honey", "peaches", "garlic",
    "tomatoes", "beans", "olives", "rice",
)  # fmt: skip
_SKILLS = (
    "piano", "chess", "pottery", "Spanish", "sailing", "drumming", "knitting", "judo", "Greek", "archery", "cello",
    "salsa", "Polish", "fencing", "rowing", "origami",
)  # fmt: skip
_PERCENTS = tuple(f"{n} percent" for n in (10, 20, 30, 40, 50, 60, 70, 80, 90))
_TRANSPORT = ("train", "bus", "car", "ferry", "bike", "plane", "tram", "scooter")
_ROOMS = ("kitchen", "garage", "attic", "balcony", "cellar", "bathroom", "garden", "hallway", "porch", "office")

PERSON_MATTERS = (
    MatterKind(
        "city", "fact",
        ("I moved to {v}.", "I live in {v} these days.", "Settled in at my flat in {v} at last."),
        ("{p} moved to {v}, by the way.", "You know {p} lives in {v} these days?"),
        ("I moved again, I am in {v} now.", "Not there any more, I live in {v} since last week."),
        ("{p} moved again, to {v} this time.", "{p} left and lives in {v} now."),
        "{p} lives in {v}", _CITIES, "Where does {p} live now?",
    ),
    MatterKind(
        "job", "fact",
        ("I got work as a {v}.", "First week as a {v} done.", "I earn my money as a {v}."),
        ("{p} got work as a {v}.", "I heard {p} works as a {v}."),
        ("I changed jobs, I am a {v} now.", "New job for me: {v}."),
        ("{p} changed jobs and is a {v} now.", "{p} has a new job: {v}."),
        "{p} works as a {v}", _JOBS, "What does {p} work as now?",
    ),
    MatterKind(
        "pet", "fact",
        ("I keep a {v} at home.", "Guess who owns a {v}? Me."),
        ("{p} keeps a {v} at home.", "Did you see the {v} that {p} keeps?"),
        ("I gave it away and keep a {v} instead.", "No longer that one, I keep a {v} now."),
        ("{p} gave it away and keeps a {v} now.", "{p} keeps a {v} instead these days."),
        "{p} keeps a {v}", _PETS, "Which pet does {p} keep now?",
    ),
    MatterKind(
        "food", "stance",
        ("I never eat {v}.", "No {v} for me, ever.", "Please keep {v} off my plate."),
        ("{p} never eats {v}.", "Careful, no {v} for {p}."),
        ("That is over for me, now I never eat {v}.", "My diet changed, no {v} from now on."),
        ("The diet of {p} changed, no {v} from now on.", "Now {p} never eats {v}."),
        "{p} never eats {v}", _FOODS, "What does {p} never eat now?",
    ),
    MatterKind(
        "skill", "fact",
        ("I am learning {v}.", "My first lesson in {v} went well."),
        ("{p} is learning {v}.", "{p} takes lessons in {v}."),
        ("I dropped that, I am learning {v} now.", "I switched to {v} lessons."),
        ("{p} dropped that and is learning {v} now.", "{p} switched to {v} lessons."),
        "{p} is learning {v}", _SKILLS, "What is {p} learning now?",
    ),
    MatterKind(
        "training", "observation",
        ("I swim every {v}.", "Every {v} I am in the pool."),
        ("{p} swims every {v}.", "Every {v} you find {p} in the pool."),
        ("I swim on another day now, every {v}.", "Pool day is {v} for me from now on."),
        ("{p} swims every {v} from now on.", "Pool day is {v} for {p} now."),
        "{p} swims every {v}", _DAYS, "On which day does {p} swim now?",
    ),
    MatterKind(
        "thesis", "fact",
        ("My thesis is {v} done.", "So far {v} of my thesis is written."),
        ("The thesis of {p} is {v} done.", "{p} has {v} of the thesis written."),
        ("My thesis stands at {v} now.", "Good news, {v} of my thesis is done."),
        ("The thesis of {p} stands at {v} now.", "{p} has reached {v} of the thesis."),
        "{p} has {v} of the thesis done", _PERCENTS, "How much of the thesis has {p} done now?",
    ),
    MatterKind(
        "room", "fact",
        ("I am painting my {v}.", "My {v} gets a new coat of paint."),
        ("{p} is painting the {v}.", "The {v} of {p} gets a new coat of paint."),
        ("That room is done, I am painting my {v} now.", "Next up with my brush: the {v}."),
        ("That room is done, {p} is painting the {v} now.", "{p} went on to paint the {v}."),
        "{p} is painting the {v}", _ROOMS, "What is {p} painting now?",
    ),
)  # fmt: skip

# Stances that two members may hold against each other: separate records, never an UPDATE.
STANCE_MATTERS = (
    MatterKind(
        "travel", "stance",
        ("I would rather go by {v}.", "If you ask me, we should take the {v}."),
        ("{p} would rather go by {v}.", "{p} wants to take the {v}."),
        ("I changed my mind, I would rather go by {v}.", "On reflection, the {v} suits me better."),
        ("{p} changed tack and would rather go by {v}.", "Now {p} wants to take the {v}."),
        "{p} prefers to go by {v}", _TRANSPORT, "How does {p} prefer to go now?",
    ),
)  # fmt: skip

# What others notice about a person: always told, never said by the person.
TRAIT_MATTERS = (
    MatterKind(
        "trait", "observation", (),
        ("{p} is always {v}.", "As ever, {p} is {v}.", "Have you noticed that {p} is always {v}?"), (), (),
        "{p} is always {v}",
        ("late", "cheerful", "tired", "hasty", "hungry", "prepared", "chatty", "helpful", "quiet", "early",
         "broke", "sceptical", "generous", "busy"),
        "What is {p} always like?",
    ),
)  # fmt: skip

# Matters of the group; one member announces them for all.
GROUP_MATTERS = (
    MatterKind(
        "trip", "decision",
        ("It is settled, we travel to {v}.", "Everyone agreed: our trip goes to {v}."), (),
        ("Change of plan for all of us: our trip goes to {v}.", "We decided again: the trip is to {v} now."), (),
        "The group travels to {v}", _CITIES, "Where does the group travel?",
    ),
    MatterKind(
        "meeting", "decision",
        ("Decided: we all meet on {v}.", "So we agreed, the group meets on {v}."), (),
        ("We moved our meeting, the group meets on {v} now.", "New day for all of us: we meet on {v}."), (),
        "The group meets on {v}", _DAYS, "On which day does the group meet?",
    ),
    MatterKind(
        "party", "decision",
        ("The party is fixed for {v}, all agreed.", "We will hold the party in {v}, that is decided."), (),
        ("All agreed to move the party to {v}.", "The party is in {v} instead, that is decided."), (),
        "The group holds the party in {v}", _MONTHS, "When does the group hold the party?",
    ),
)  # fmt: skip

NORM_MATTERS = (
    MatterKind(
        "norm", "observation",
        ("As usual in this group, we {v}.", "You know our custom, we {v}."), (), (), (),
        "The group custom is: we {v}",
        ("split the bill", "bring our own cups", "take turns with cooking", "keep phones off at dinner", "send no voice notes",
         "start on time", "vote by show of hands", "share our photos", "rotate the host", "buy no gifts"),
        "What is the custom of the group?",
    ),
)  # fmt: skip

SIDE_TALK = (
    "Haha, nice one.", "Good morning all!", "See you later.", "Did anyone watch the match?", "I need coffee.", "Lol.",
    "Thanks a lot!", "What a week.", "So much rain today.", "Sorry, I was away.", "Who is online?", "Great, thanks.",
    "That made my day.", "My battery is nearly flat.", "One moment please.", "Sounds good to me.", "Oh wow.", "No idea, honestly.",
    "Can you hear me?", "Back in ten minutes.",
)  # fmt: skip
SIDE_TALK_NAMED = (
    "{p}, are you there?", "Ha, {p}, well said.", "{p}, call me when you can.", "Thanks, {p}!", "{p}, did you see this?",
    "Happy to help, {p}.",
)  # fmt: skip
