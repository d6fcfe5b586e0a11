"""Nouns, names and places shared by all parts of the generator."""

from tools.demo_model.grammar import words

ANIMALS = words(
    """fox owl bear rabbit mouse cat dog hedgehog squirrel badger otter wolf deer frog duck goose hen goat
sheep cow horse pony donkey pig lion tiger elephant giraffe monkey zebra penguin seal whale dolphin
octopus crab turtle snail bee ant butterfly sparrow robin crow swan mole beaver bat parrot camel
kangaroo koala panda hippo crocodile lizard snake spider ladybird raccoon moose llama flamingo
peacock hamster kitten puppy lamb swallow starfish eagle hare"""
)
# Helpers that a request may name; otherwise the plot determines the helper.
HELPERS = words("fox owl bear rabbit mouse badger otter hedgehog squirrel beaver crow turtle")
PEOPLE = words(
    """farmer baker sailor gardener painter teacher shepherd tailor blacksmith fisherman knight wizard giant
astronaut pirate clown doctor postman explorer inventor miller cook musician"""
)
BOYS = words("boy king prince grandfather")
GIRLS = words("girl queen princess grandmother witch fairy mermaid")
THINGS = words(
    """robot dragon ghost snowman teapot train tractor cloud star dinosaur unicorn monster scarecrow doll
spaceship boat troll elf gnome alien toaster balloon"""
)

# Few enough that the model learns their pronouns.
MALE_NAMES = words("Tom Ben Felix Oscar Leo Max Milo Hugo Otto Finn Sam Jack Toby Bruno Karl Theo")
FEMALE_NAMES = words("Anna Lily Mia Nora Ruby Clara Ella Zoe Lena Maya Ida Rosa Wanda Bella Greta Sofia")

TRAITS = words(
    """brave clever kind shy curious gentle cheerful little young old lonely quiet friendly small hungry
sleepy happy sad proud clumsy lazy"""
)

# Each place in the first sentence of a story, in a request, and as a noun in later sentences.
PLACES = (
    ("in a green forest", "in the forest", "forest"),
    ("in a little house by the sea", "by the sea", "sea"),
    ("on a small farm", "on a farm", "farm"),
    ("in a busy town", "in a town", "town"),
    ("high in the mountains", "in the mountains", "mountains"),
    ("on a quiet island", "on an island", "island"),
    ("near a wide river", "by the river", "river"),
    ("in a sunny meadow", "in a meadow", "meadow"),
    ("at the edge of a warm desert", "in the desert", "desert"),
    ("far away on the moon", "on the moon", "moon"),
    ("in a snowy valley", "in the snow", "valley"),
    ("in an old castle", "in a castle", "castle"),
    ("beside a blue lake", "by a lake", "lake"),
    ("in a little village", "in a village", "village"),
    ("deep in the jungle", "in the jungle", "jungle"),
    ("in a big city", "in the city", "city"),
    ("in a garden full of flowers", "in a garden", "garden"),
    ("on a ship that sailed from port to port", "on a ship", "ship"),
    ("in a space station among the stars", "in space", "space station"),
)

OBJECTS = words(
    "red kite;silver bell;blue scarf;golden key;little drum;old map;wooden flute;music box;brass lantern;"
    "shiny button;picture book;paper boat;straw hat;glass marble;yellow umbrella;magic stone;warm blanket;"
    "teddy bear;gold ring;wooden spoon;green ball;pocket watch",
    ";",
)
