"""Texts of five kinds, for benchmarks whose numbers depend on what is said: prose in three languages, code, JSON."""

from __future__ import annotations

import json
from pathlib import Path

from stowage.demo import corpus

GERMAN = """Am Morgen lag Nebel über dem Hafen, und die Kräne standen still wie Tiere, die auf etwas warten. Der Lotse
trank seinen Kaffee im Stehen, sah auf die Uhr und auf das Wasser und sagte, vor neun laufe heute nichts
aus. Also blieben die Matrosen an Bord, flickten Leinen, schrieben Karten nach Hause und stritten darüber,
wie man eine Ladung so verteilt, dass ein Schiff auch bei schwerer See ruhig liegt. Das Schwere nach unten,
sagte der Älteste, und was zuerst gebraucht wird, nach oben; wer es umgekehrt macht, räumt in jedem Hafen
alles zweimal um. Der Jüngste fragte, woher man denn wisse, was zuerst gebraucht werde. Darauf wusste keiner
eine gute Antwort, nur der Koch: Man merke sich, was beim letzten Mal gefehlt habe. Gegen zehn riss der
Nebel auf, die Sonne stand weiß über den Speichern, und alles begann auf einmal."""
FRENCH = """Le vieux libraire rangeait ses livres selon un ordre que lui seul comprenait. Les romans de voyage
touchaient les traités de cuisine, parce que, disait-il, on ne part jamais loin sans penser à ce que l'on
mangera. Les clients s'en plaignaient d'abord, puis ils prenaient goût à ces rencontres: on venait chercher
une carte des Alpes et l'on repartait avec un recueil de fables. Un jour une étudiante lui proposa de tout
classer par auteur, avec des fiches et un ordinateur. Il réfléchit longtemps, servit du thé, puis répondit
que l'on trouverait certes plus vite ce que l'on cherchait, mais que l'on ne trouverait plus jamais ce que
l'on ne cherchait pas. Elle rit, posa ses fiches, et revint chaque samedi. Après quelques mois elle
connaissait les rayons mieux que lui, et les passants croyaient qu'elle en était la patronne. La boutique
existe encore, entre le fleuriste et la gare, et rien n'y a changé de place."""


def documents() -> dict[str, str]:
    """Text by what it is."""
    results = Path(__file__).parent / "results"
    records = next(iter(sorted(results.glob("*.json"))), None)
    return {
        "English": corpus.document_text(),
        "German": GERMAN,
        "French": FRENCH,
        "code": Path(__file__).with_name("lossless.py").read_text(encoding="utf-8"),
        "JSON": records.read_text(encoding="utf-8")
        if records
        else json.dumps([{"id": n, "v": n / 7} for n in range(400)]),
    }
